"""Scoring while sampling: each response is scored as soon as it ends, where it was sampled."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Self

from caldera.config import PPOTrainerConfig
from caldera.data import object_array
from caldera.errors import CalderaError
from caldera.protocol import DataProto
from caldera.reward.loading import load_reward_manager
from caldera.reward.manager import OUTCOMES, NaiveRewardManager, RewardManager
from caldera.reward.managers import LimitedRewardManager
from caldera.reward.samples import Outcome, Pending
from caldera.reward.scoring import attempt
from caldera.rollout.base import Completion
from caldera.rollout.batch import completions_to_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROWS = "reward_rows"
"""Column of what a scorer needs to know of each row: its other columns, as a dict."""

SHARE_OF_PATIENCE = 0.5
"""Of `actor_rollout_ref.nccl_timeout`, in which a rank is done with sampling and its scores."""


def streams(config: PPOTrainerConfig, manager: RewardManager) -> bool:
    """Whether responses are scored while others are sampled.

    Not where the manager knows whole batches alone, where a reward model shares the sampler's
    devices, nor where ranks would each have a rate that they ought to share.
    """
    by_sample = isinstance(manager, NaiveRewardManager) and (
        type(manager).__call__ is NaiveRewardManager.__call__
    )
    ranks = (config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes
    if isinstance(manager, LimitedRewardManager) and ranks > 1:
        return False
    return config.reward.streaming and by_sample and not config.reward_model.scores_later


class StreamingScorer:
    """Makes a `StreamedScoring` for each batch of prompts. It is built where it is used."""

    def __init__(
        self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, rank: int = 0
    ) -> None:
        manager = load_reward_manager(config, tokenizer, num_examine=0)
        assert isinstance(manager, NaiveRewardManager), "others do not stream"
        self._manager = manager
        self._response_length = config.actor_rollout_ref.rollout.response_length
        self._patience = config.actor_rollout_ref.nccl_timeout * SHARE_OF_PATIENCE
        self._rank = rank

    def begin(self, prompts: DataProto) -> StreamedScoring:
        return StreamedScoring(
            self._manager, prompts, self._response_length, self._patience, self._rank
        )

    def finish(self) -> None:
        """`join` has waited for every score."""


class StreamedScoring:
    """The scoring of one batch: told of each response, it ends with a column of outcomes.

    Responses come inside of a `with`, at whose end no more are expected.
    """

    def __init__(
        self,
        manager: NaiveRewardManager,
        prompts: DataProto,
        response_length: int,
        patience: float,
        rank: int = 0,
    ) -> None:
        self._manager = manager
        self._prompts = prompts
        self._response_length = response_length
        self._patience = patience
        self._rank = rank
        self._begun = time.perf_counter()
        self._finished: queue.SimpleQueue[tuple[int, Completion] | None] = queue.SimpleQueue()
        self._fed: Future[dict[int, Pending]] = Future()
        threading.Thread(target=self._feed, name="streamed scoring", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._finished.put(None)

    def on_finished(self, place: int, completion: Completion) -> None:
        """Have a response scored. The sampler goes on at once."""
        self._finished.put((place, completion))

    def join(self, answers: DataProto) -> DataProto:
        """The responses with a column of outcomes, and the seconds of sampling and of waiting.

        The outcome of a row that is not there in time is None: the controller scores it. So it
        does where the data or the configuration is wrong, and reports that itself.
        """
        sampled = time.perf_counter()
        outcomes: list[Outcome | None] = [None] * len(answers)
        try:
            pending = self._fed.result()
            left = self._begun + self._patience - time.perf_counter()
            wait([each.future for each in pending.values()], max(left, 0.0))
            for row, waiting in pending.items():
                outcomes[row] = self._outcome(waiting)
        except CalderaError as error:
            logger.warning(
                "rank %d: responses are left to the controller to score: %s", self._rank, error
            )
        answers.non_tensor_batch[OUTCOMES] = object_array(outcomes)
        answers.meta_info["metrics"] = {
            "reward_sampling": sampled - self._begun,
            "reward_wait": time.perf_counter() - sampled,
        }
        return answers

    def _outcome(self, pending: Pending) -> Outcome | None:
        if not pending.future.done():
            pending.future.cancel()
            return None
        return self._manager.outcome(pending)

    def _feed(self) -> None:
        """Submit responses as they come: decoding them should not hold up the sampler."""
        done = attempt(self._submit_all)
        if (error := done.exception()) is not None:
            self._fed.set_exception(error)
        else:
            self._fed.set_result(done.result())

    def _submit_all(self) -> dict[int, Pending]:
        pending: dict[int, Pending] = {}
        while finished := self._take():
            for places, rows in self._batches(finished):
                for row, place in enumerate(places):
                    pending[place] = self._manager.submit(rows, row)
        return pending

    def _take(self) -> list[tuple[int, Completion]]:
        """The next responses, all that there are by then; none if no more are expected."""
        taken: list[tuple[int, Completion]] = []
        while not taken or not self._finished.empty():
            one = self._finished.get()
            if one is None:
                self._finished.put(None)  # to be found again, behind what was taken
                break
            taken.append(one)
        return taken

    def _batches(
        self, finished: Sequence[tuple[int, Completion]]
    ) -> Iterator[tuple[list[int], DataProto]]:
        """Places, and the batch of them that the controller would have. Rows with other columns
        than others are in a separate batch."""
        told = self._prompts.non_tensor_batch[ROWS]
        alike: dict[tuple[str, ...], list[tuple[int, Completion, dict[str, Any]]]] = {}
        for place, completion in finished:
            columns = told[place] | completion.columns
            alike.setdefault(tuple(columns), []).append((place, completion, columns))
        for names, members in alike.items():
            places = [place for place, _, _ in members]
            prompts = self._prompts[places]
            rows = completions_to_batch(
                prompts,
                [completion for _, completion, _ in members],
                self._response_length,
                prompts.meta_info["pad_token_id"],
                False,
            )
            rows.non_tensor_batch |= {
                name: object_array([columns[name] for _, _, columns in members]) for name in names
            }
            yield places, rows
