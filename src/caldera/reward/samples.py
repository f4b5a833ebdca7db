"""One response as its scorer sees it, and what became of it."""

from __future__ import annotations

import json
import logging
import math
import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from caldera.errors import CalderaError, DataError, RewardError
from caldera.protocol import DataProto, tensors_of
from caldera.reward.explaining import explain, in_words, shown, traced, writable
from caldera.reward.scoring import CallTimeout, attempt

logger = logging.getLogger(__name__)

VALUE, FAILED, TIMED_OUT = "value", "failed", "timed_out"
"""States of a reward: it is there; the scorer raised or returned nonsense; it took too long."""
STATE_KEY, ERROR_KEY = "reward_state", "reward_error"
"""Columns of states and errors, whose names no scorer may use."""

SHOWN_RESPONSE_CHARACTERS = 200  # of a response, in an error message

# Columns of rollouts and agent loops about a sample, and their names in the scorer's `extra_info`.
ROLLOUT_COLUMNS = {
    "__num_turns__": "num_turns",
    "reward_scores": "rollout_reward_scores",
    "turn_scores": "turn_scores",
    "tool_rewards": "tool_rewards",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a sample: its score, or why it has none (the score is then 0)."""

    score: float = 0.0
    extras: dict[str, Any] = field(default_factory=dict)
    """Whatever else the scorer said of it."""
    state: str = VALUE
    error: str | None = None
    """One line, unless there is a value."""


@dataclass
class Sample:
    """One response, as its scorer sees it."""

    row: int
    uid: str | None
    data_source: str
    response: str
    response_length: int  # tokens
    ground_truth: Any
    extra_info: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name in messages: its row may be one of a part of the batch."""
        return f"row {self.row}" if self.uid is None else f"uid {self.uid}"

    def error(self, problem: str) -> RewardError:
        uid = "" if self.uid is None else f" (uid {self.uid})"
        start = self.response[:SHOWN_RESPONSE_CHARACTERS]
        more = "..." if len(start) < len(self.response) else ""
        return RewardError(
            f"row {self.row}{uid}: {problem}\n"
            f"  data_source:  {self.data_source}\n"
            f"  ground_truth: {self.ground_truth!r}\n"
            f"  response:     {start!r}{more}"
        )


@dataclass(frozen=True)
class Pending:
    """A sample whose score is being computed."""

    sample: Sample
    future: Future[Any]


def row_values(data: DataProto, row: int, reward_fn_key: str) -> dict[str, Any]:
    """The columns of a row that make a `Sample`, under its names."""
    columns = data.non_tensor_batch
    _require_column(columns, reward_fn_key, "named by data.reward_fn_key")
    _require_column(columns, "reward_model", "which holds the ground truth")
    return {
        "row": row,
        "uid": columns["uid"][row] if "uid" in columns else None,
        "data_source": columns[reward_fn_key][row],
        "ground_truth": _ground_truth(columns["reward_model"][row], row),
        "extra_info": _extra_info(columns, row),
    }


def response_lengths(data: DataProto) -> torch.Tensor:
    """(B,): tokens of each response."""
    tensors = tensors_of(data)
    lengths: torch.Tensor = tensors["attention_mask"][:, tensors["prompts"].shape[-1] :].sum(-1)
    return lengths


def prompt_ids(data: DataProto, row: int) -> torch.Tensor:
    prompt: torch.Tensor = tensors_of(data)["prompts"][row]  # (P,), padded on the left
    length = int(tensors_of(data)["attention_mask"][row, : len(prompt)].sum())
    return prompt[len(prompt) - length :]


def _require_column(columns: Mapping[str, np.ndarray], name: str, role: str) -> None:
    if name not in columns:
        there = ", ".join(sorted(columns)) or "no columns"
        raise DataError(f"scoring needs the column {name!r}, {role}; the data has {there}")


def _ground_truth(reward_model: Any, row: int) -> Any:
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise DataError(
            f"row {row}: the column 'reward_model' must hold a dict with 'ground_truth', "
            f"got {reward_model!r}"
        )
    return reward_model["ground_truth"]


def _extra_info(columns: Mapping[str, np.ndarray], row: int) -> dict[str, Any]:
    """The row's own `extra_info`, copied, with what the rollout knows about the sample."""
    own = columns["extra_info"][row] if "extra_info" in columns else None
    if own is not None and not isinstance(own, Mapping):
        raise DataError(f"row {row}: the column 'extra_info' must hold a dict, got {own!r}")
    added = {
        name: plain(columns[column][row])
        for column, name in ROLLOUT_COLUMNS.items()
        if column in columns
    }
    return dict(own or {}) | added


def read_score(returned: Any) -> tuple[float, dict[str, Any]]:
    """The score in what a score function returned, and all that it said; or RewardError."""
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "nothing"
            raise RewardError(f"the score function returned a dict without 'score', with {keys}")
        extras = {writable(str(key)): plain(value) for key, value in returned.items()}
        score = extras["score"]
    else:
        score = plain(returned)
        extras = {"acc": score}  # the variable that validation reports first
    return finite(score, "the score"), extras


def outcome_of(score: float, extras: dict[str, Any]) -> Outcome:
    """The outcome of a sample that has a score; RewardError if it cannot be recorded."""
    for name in (STATE_KEY, ERROR_KEY):
        if name in extras:
            raise RewardError(f"{name!r} is a reserved name, which no scorer may return")
    outcome = Outcome(score, extras)
    # Another process may want to know it, and what is scored must not depend on where it is.
    if (error := attempt(pickle.dumps, outcome).exception()) is not None:
        said = in_words(error)
        raise RewardError(f"what the scorer returned cannot be sent to another process: {said}")
    return Outcome(score, {name: recordable(value) for name, value in extras.items()})


def recordable(value: Any) -> Any:
    """The value if metrics and files can hold it, else a line that shows it."""
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, bool | float | None):
        return value
    if isinstance(value, int):
        return value if _as_float(value) is not None else shown(value)
    written = attempt(_written, value)
    return shown(value) if written.exception() is not None else value


def _written(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, default=lambda held: held.tolist())
    return text.encode()


def finite(value: Any, what: str) -> float:
    """The value as a number, or RewardError."""
    value = plain(value)
    number = _as_float(value) if isinstance(value, int | float) else None
    if number is None or not math.isfinite(number):
        raise RewardError(f"{what} must be a finite number, and is {shown(value)}")
    return number


def _as_float(value: float) -> float | None:
    try:
        return float(value)
    except OverflowError:  # an int with more than 308 digits
        return None


def failure(error: BaseException) -> Outcome:
    """The outcome of a sample whose scoring raised this, if it is not a mistake of the run's.

    A `RewardError` reports an unscored sample. Any other error of Caldera's own says
    that the data or the configuration cannot be used, which no other sample will change.
    """
    kind = type(error)  # an exception of the user's may have a `__class__` of another
    if issubclass(kind, CallTimeout):
        return Outcome(state=TIMED_OUT, error=str(error))
    if issubclass(kind, RewardError):
        return Outcome(state=FAILED, error=shown(error, str))
    if issubclass(kind, CalderaError | KeyboardInterrupt):
        raise error
    if not _traceback_is_shown.is_set():
        _traceback_is_shown.set()
        logger.error("the first failure of a score function:\n%s", traced(error))
    return Outcome(state=FAILED, error=explain(error))


_traceback_is_shown = threading.Event()
"""Set by the first failure in this process; the line of any other is enough."""


def plain(value: Any) -> Any:
    """A NumPy or torch scalar as the Python number that it holds; anything else as it is."""
    is_one = (isinstance(value, torch.Tensor) and value.numel() == 1) or (
        isinstance(value, np.ndarray) and value.size == 1
    )
    if isinstance(value, np.generic) or is_one:
        return value.item()
    return value
