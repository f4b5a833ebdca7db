"""Scoring while sampling: each response is scored as soon as it ends, where it was sampled."""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Self

from caldera.config import PPOTrainerConfig
from caldera.data import object_array
from caldera.errors import CalderaError
from caldera.protocol import DataProto
from caldera.reward.limited import LimitedRewardManager
from caldera.reward.loading import load_reward_manager
from caldera.reward.manager import OUTCOMES, NaiveRewardManager, RewardManager
from caldera.reward.samples import Outcome, Pending
from caldera.reward.scoring import attempt
from caldera.rollout.base import Completion
from caldera.rollout.batch import completions_to_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ROWS", "StreamedScoring", "StreamingScorer", "streams"]

logger = logging.getLogger(__name__)

ROWS = "reward_rows"
"""Column of what a scorer needs to know of each row: its other columns, as a dict."""

SHARE_OF_PATIENCE = 0.5
"""Of `actor_rollout_ref.nccl_timeout`, in which a rank is done with sampling and its scores."""


def streams(config: PPOTrainerConfig, manager: RewardManager) -> bool:
    """Whether answers are scored while others are sampled.

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

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        manager = load_reward_manager(config, tokenizer, num_examine=0)
        assert isinstance(manager, NaiveRewardManager), "others do not stream"
        self._manager = manager
        self._response_length = config.actor_rollout_ref.rollout.response_length
        self._patience = config.actor_rollout_ref.nccl_timeout * SHARE_OF_PATIENCE

    def __call__(self, prompts: DataProto) -> StreamedScoring:
        return StreamedScoring(self._manager, prompts, self._response_length, self._patience)


class StreamedScoring:
    """The scoring of one batch: told of each response, it ends with a column of outcomes.

    Responses come inside of a `with`, at whose end no more are expected.
    """

    def __init__(
        self, manager: NaiveRewardManager, prompts: DataProto, response_length: int, patience: float
    ) -> None:
        self._manager = manager
        self._prompts = prompts
        self._response_length = response_length
        self._patience = patience
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
        """The answers with a column of outcomes, and the seconds of sampling and of waiting.

        The outcome of a row that is not there in time is None: the controller scores it. So it
        does where the data or the configuration is wrong, and tells of that itself.
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
            logger.warning("answers are left to the controller to score: %s", error)
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
        if error := done.exception():
            self._fed.set_exception(error)
        else:
            self._fed.set_result(done.result())

    def _submit_all(self) -> dict[int, Pending]:
        pending: dict[int, Pending] = {}
        while (finished := self._finished.get()) is not None:
            place, completion = finished
            pending[place] = self._manager.submit(self._row(place, completion), 0)
        return pending

    def _row(self, place: int, completion: Completion) -> DataProto:
        """The batch of one row that the controller would have."""
        prompt = self._prompts[place : place + 1]
        row = completions_to_batch(
            prompt, [completion], self._response_length, prompt.meta_info["pad_token_id"], False
        )
        columns: dict[str, Any] = prompt.non_tensor_batch[ROWS][0] | completion.columns
        row.non_tensor_batch |= {key: object_array([value]) for key, value in columns.items()}
        return row
