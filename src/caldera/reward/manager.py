"""Reward managers: a generated batch in, a reward for every response out."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeGuard

import numpy as np
import torch

from caldera.errors import RewardError
from caldera.protocol import DataProto, tensors_of
from caldera.registry import Registry
from caldera.reward.custom import ScoreFunction, named_arguments
from caldera.reward.default import score_by_data_source
from caldera.reward.explaining import no_exit, shown
from caldera.reward.samples import (
    ERROR_KEY,
    FAILED,
    STATE_KEY,
    TIMED_OUT,
    VALUE,
    Outcome,
    Pending,
    Sample,
    failure,
    outcome_of,
    prompt_ids,
    read_score,
    recordable,
    response_lengths,
    row_values,
)
from caldera.reward.scoring import Scoring, ScoringLimits, ThreadScoring, attempt
from caldera.tracking.progress import print_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OUTCOMES = "reward_outcomes"
"""Column of what is known already of each row's reward; None for a row that is still to score."""


class RewardResult(TypedDict):
    reward_tensor: torch.Tensor  # (B, R)
    reward_extra_info: dict[str, list[Any]]
    """One item a sample under every key; None for a sample whose scorer did not give the key. Where
    a sample could not be scored, `reward_state` and `reward_error` have the reason."""


class RewardManager(Protocol):
    """Called with `return_dict`, a manager returns a `RewardResult`, else the reward tensor."""

    def __call__(
        self, data: DataProto, return_dict: bool = False
    ) -> torch.Tensor | RewardResult: ...


REWARD_MANAGERS: Registry[Callable[..., RewardManager]] = Registry(
    "reward_model.reward_manager (or reward_manager.name)"
)


def compute_reward(
    data: DataProto, reward_fn: RewardManager
) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """The reward of every response token (B, R), and what else the scorers said of each sample.

    A sample that could not be scored has rewards of 0, and a `reward_state` with the reason.
    """
    kind = type(inspect.unwrap(reward_fn))  # of the manager itself
    with nullcontext() if _is_ours(kind) else no_exit():
        done = attempt(reward_fn, data, return_dict=True)
    error = done.exception()
    if error is not None and not _is_ours(kind):
        failed = failure(error)  # or raises: it is a mistake of the run's
        logger.error("%s failed on a whole batch: %s", kind.__name__, failed.error)
        rewards = torch.zeros(tensors_of(data)["responses"].shape)
        return rewards, _with_states([failed] * len(data), {})
    result = done.result()
    if not _is_reward_result(result):
        raise RewardError(
            f"{kind.__name__} returned {_described(result)} where return_dict=True asks for a dict "
            "with the tensor reward_tensor and the dict reward_extra_info"
        )
    _check_sizes(kind, result, tensors_of(data)["responses"].shape)
    extras = result["reward_extra_info"]
    if not _is_ours(kind):
        extras = {key: [recordable(value) for value in values] for key, values in extras.items()}
    return _without_nonsense(result["reward_tensor"], extras)


def _is_ours(kind: type) -> bool:
    """Our managers keep failures to their samples: whatever they raise is meant to be seen."""
    return kind.__module__.startswith("caldera.")


def _is_reward_result(returned: Any) -> TypeGuard[RewardResult]:
    return (
        isinstance(returned, Mapping)
        and isinstance(returned.get("reward_tensor"), torch.Tensor)
        and isinstance(returned.get("reward_extra_info"), dict)
    )


def _check_sizes(kind: type, result: RewardResult, shape: torch.Size) -> None:
    rewards = result["reward_tensor"].shape
    if rewards != shape:
        raise RewardError(
            f"{kind.__name__} returned a reward_tensor of shape {tuple(rewards)}, where the "
            f"responses have {tuple(shape)}: it takes a number for every response token"
        )
    for key, values in result["reward_extra_info"].items():
        is_column = isinstance(values, Sequence | np.ndarray | torch.Tensor)
        if not is_column or isinstance(values, str) or len(values) not in (0, shape[0]):
            raise RewardError(
                f"{kind.__name__} returned reward_extra_info[{key!r}]={shown(values)}: it takes a "
                f"list with an item for each of the {shape[0]} responses"
            )


def _described(returned: Any) -> str:
    if isinstance(returned, Mapping):
        kinds = [f"{key}: {type(value).__name__}" for key, value in returned.items()]
        return f"a dict of {{{', '.join(kinds)}}}"
    return f"a {type(returned).__name__}"


class NaiveRewardManager:
    """Scores each response by itself and puts the score on its last token.

    `reward_kwargs` are passed on to every call of the score function. The first `num_examine`
    samples of each data source are shown on the console.
    """

    limits = ScoringLimits()
    """Of the calls of the score function; to be set before the first of them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: ScoreFunction | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or score_by_data_source
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | RewardResult:
        result = _given_scores(data) if "rm_scores" in tensors_of(data) else self._score(data)
        return result if return_dict else result["reward_tensor"]

    # ------------------------------------------------------------------ one sample

    def submit(self, data: DataProto, row: int) -> Pending:
        """Have a row scored; `outcome` waits for it."""
        sample = self._sample(data, row)
        return Pending(sample, self._scoring.submit(self._arguments(data, sample), sample.name))

    def outcome(self, pending: Pending) -> Outcome:
        """The outcome of a sample. Raises mistakes of the run's."""
        if (error := pending.future.exception()) is not None:
            return failure(error)
        with no_exit():  # the value may be of a class with custom methods
            judged = attempt(self._judged, pending)
        if (error := judged.exception()) is not None:
            return failure(error)
        outcome: Outcome = judged.result()
        return outcome

    @functools.cached_property
    def _scoring(self) -> Scoring:
        limits = self.limits
        return ThreadScoring(self.compute_score, limits.timeout, limits.num_workers or 1)

    def _arguments(self, data: DataProto, sample: Sample) -> Mapping[str, Any]:
        prompt = {"raw_prompt": self._messages(data, sample.row)} if self._takes_prompt else {}
        return {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
            **prompt,
            **self.reward_kwargs,
        }

    @functools.cached_property
    def _takes_prompt(self) -> bool:
        """Whether the score function asks for the messages of the prompt."""
        return bool(named_arguments(self.compute_score, {"raw_prompt": lambda: None}))

    def keywords(self) -> list[str]:
        """The names of the arguments that the score function is called with."""
        prompt = ["raw_prompt"] if self._takes_prompt else []
        return [
            "data_source",
            "solution_str",
            "ground_truth",
            "extra_info",
            *prompt,
            *self.reward_kwargs,
        ]

    def _messages(self, data: DataProto, row: int) -> list[dict[str, Any]]:
        """The prompt's messages; where a run does not keep them, the prompt as one message."""
        if "raw_prompt" in data.non_tensor_batch:
            return list(data.non_tensor_batch["raw_prompt"][row])
        return [{"role": "user", "content": self._decode(prompt_ids(data, row))}]

    def _judged(self, pending: Pending) -> Outcome:
        return outcome_of(*self._judge(pending.sample, pending.future.result()))

    def _judge(self, sample: Sample, returned: Any) -> tuple[float, dict[str, Any]]:
        """The reward of a sample, and what is recorded about it; or RewardError."""
        return read_score(returned)

    def _sample(self, data: DataProto, row: int) -> Sample:
        tensors = tensors_of(data)
        length = int(tensors["attention_mask"][row, tensors["prompts"].shape[-1] :].sum())
        response = self._response_text(tensors["responses"][row, :length])
        values = row_values(data, row, self.reward_fn_key)
        return Sample(response=response, response_length=length, **values)

    # ------------------------------------------------------------------ a batch

    def _score(self, data: DataProto) -> RewardResult:
        given = data.non_tensor_batch.get(OUTCOMES)
        known: list[Outcome | None] = [None] * len(data) if given is None else list(given)
        outcomes = self._outcomes(data, known)
        self._report_failures(data, outcomes)
        self._show_examples(data, outcomes)
        return RewardResult(
            reward_tensor=place_scores(data, [outcome.score for outcome in outcomes]),
            reward_extra_info=_with_states(
                outcomes, _as_columns([outcome.extras for outcome in outcomes])
            ),
        )

    def _outcomes(self, data: DataProto, known: Sequence[Outcome | None]) -> list[Outcome]:
        """The outcome of every row, of which some may be known."""
        pending = [
            self.submit(data, row) if outcome is None else None for row, outcome in enumerate(known)
        ]
        return [
            self.outcome(waiting) if waiting is not None else outcome or Outcome()
            for waiting, outcome in zip(pending, known, strict=True)
        ]

    def _report_failures(self, data: DataProto, outcomes: list[Outcome]) -> None:
        failed = [row for row, outcome in enumerate(outcomes) if outcome.state != VALUE]
        if failed:
            said = self._sample(data, failed[0]).error(outcomes[failed[0]].error or "")
            logger.error(
                "%d of %d samples could not be scored. The first: %s",
                len(failed),
                len(outcomes),
                said,
            )

    def _show_examples(self, data: DataProto, outcomes: list[Outcome]) -> None:
        if not self.num_examine:
            return
        shown: Counter[str] = Counter()
        for row, outcome in enumerate(outcomes):
            sample = self._sample(data, row)
            if shown[sample.data_source] >= self.num_examine:
                continue
            shown[sample.data_source] += 1
            lines = {
                "prompt": self._decode(prompt_ids(data, sample.row)),
                "response": sample.response,
                "ground_truth": sample.ground_truth,
                "score": outcome.score if outcome.state == VALUE else outcome.error,
            }
            for name, value in (lines | outcome.extras).items():
                print_line(f"[{name}] {value}")

    def _response_text(self, token_ids: torch.Tensor) -> str:
        return self._decode(token_ids)

    def _decode(self, token_ids: torch.Tensor) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


REWARD_MANAGERS.register("naive")(NaiveRewardManager)


def is_built_in(manager: RewardManager) -> TypeGuard[NaiveRewardManager]:
    """Whether it is known how a manager scores: one that a user derived may do it otherwise."""
    return isinstance(manager, NaiveRewardManager) and _is_ours(type(manager))


def place_scores(data: DataProto, scores: Sequence[float]) -> torch.Tensor:
    """(B, R): each score on the last token of its response."""
    responses, lengths = tensors_of(data)["responses"], response_lengths(data)  # (B, R), (B,)
    values = torch.tensor(scores, dtype=torch.float32, device=responses.device)
    rewards = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
    # A response without tokens has no last one, and position -1 would be padding.
    rows = (lengths > 0).nonzero(as_tuple=True)[0]
    rewards[rows, lengths[rows] - 1] = values[rows]
    return rewards


def _given_scores(data: DataProto) -> RewardResult:
    """The scores that a reward model or an agent loop has written already."""
    extra_keys = data.meta_info.get("reward_extra_keys", [])
    return RewardResult(
        reward_tensor=tensors_of(data)["rm_scores"],
        reward_extra_info={key: data.non_tensor_batch[key].tolist() for key in extra_keys},
    )


def _as_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)  # in the order they first come
    return {name: [row.get(name) for row in rows] for name in names}


def _with_states(outcomes: list[Outcome], extras: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if all(outcome.state == VALUE for outcome in outcomes):
        return extras
    return extras | {
        STATE_KEY: [outcome.state for outcome in outcomes],
        ERROR_KEY: [outcome.error for outcome in outcomes],
    }


def _without_nonsense(
    rewards: torch.Tensor, extras: dict[str, list[Any]]
) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Rewards and states that make no sense, from a manager of the user's own, are failures."""
    states = extras.get(STATE_KEY, [VALUE] * len(rewards))
    problems = [
        _problem(is_finite, state)
        for is_finite, state in zip(rewards.isfinite().all(-1).tolist(), states, strict=True)
    ]
    is_bad = torch.tensor([problem is not None for problem in problems], device=rewards.device)
    if not is_bad.any():
        return rewards, extras
    outcomes = [
        Outcome(state=FAILED if problem else state, error=problem or error)
        for problem, state, error in zip(
            problems, states, extras.get(ERROR_KEY, [None] * len(rewards)), strict=True
        )
    ]
    first = is_bad.tolist().index(True)
    logger.error(
        "%d rewards make no sense. The first: row %d: %s", int(is_bad.sum()), first, problems[first]
    )
    return rewards.masked_fill(is_bad[:, None], 0), _with_states(outcomes, extras)


def _problem(is_finite: bool, state: Any) -> str | None:
    if state not in (VALUE, FAILED, TIMED_OUT):
        return f"{STATE_KEY!r} is a reserved name, and the reward manager returned {state!r} there"
    if not is_finite:
        return "the reward manager returned a reward that is no finite number"
    return None
