"""Reward managers: a generated batch in, a reward for every response out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np
import torch
from rich.console import Console

from caldera.errors import CalderaError, DataError, RewardError
from caldera.protocol import DataProto
from caldera.registry import Registry
from caldera.reward.custom import ScoreFunction, await_all
from caldera.reward.default import score_by_data_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "REWARD_MANAGERS",
    "NaiveRewardManager",
    "RewardManager",
    "RewardResult",
    "Sample",
    "compute_reward",
]

SHOWN_RESPONSE_CHARACTERS = 200  # of a response, in an error message

# What rollouts and agent loops know about a sample, and its name in the scorer's `extra_info`.
ROLLOUT_COLUMNS = {
    "__num_turns__": "num_turns",
    "reward_scores": "rollout_reward_scores",
    "turn_scores": "turn_scores",
    "tool_rewards": "tool_rewards",
}


class RewardResult(TypedDict):
    reward_tensor: torch.Tensor  # (B, R)
    reward_extra_info: dict[str, list[Any]]
    """One item a sample under every key; None for a sample whose scorer did not give the key."""


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
    """The reward of every response token (B, R), and what else the scorers said of each sample."""
    result = reward_fn(data, return_dict=True)
    if isinstance(result, torch.Tensor):
        raise RewardError(
            f"{type(reward_fn).__name__} returned a tensor where return_dict=True asks for a dict "
            "with reward_tensor and reward_extra_info"
        )
    return result["reward_tensor"], result["reward_extra_info"]


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

    def error(self, problem: str) -> RewardError:
        start = self.response[:SHOWN_RESPONSE_CHARACTERS]
        more = "..." if len(start) < len(self.response) else ""
        uid = "" if self.uid is None else f" (uid {self.uid})"
        return RewardError(
            f"row {self.row}{uid}: {problem}\n"
            f"  data_source:  {self.data_source}\n"
            f"  ground_truth: {self.ground_truth!r}\n"
            f"  response:     {start!r}{more}"
        )


@REWARD_MANAGERS.register("naive")
class NaiveRewardManager:
    """Scores each response by itself and puts the score on its last token.

    `reward_kwargs` are passed on to every call of the score function. The first `num_examine`
    samples of each data source are shown on the console.
    """

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
        assert data.batch is not None, "a batch without tensors has nothing to score"
        result = _given_scores(data) if "rm_scores" in data.batch else self._score(data)
        return result if return_dict else result["reward_tensor"]

    def _score(self, data: DataProto) -> RewardResult:
        responses = _tensor(data, "responses")  # (B, R)
        prompt_length = _tensor(data, "prompts").shape[-1]
        lengths = _tensor(data, "attention_mask")[:, prompt_length:].sum(-1)  # (B,)
        samples = self._samples(data, lengths.tolist())
        returned = await_all([self._call(sample) for sample in samples])
        scored = list(map(self._judge, samples, returned))
        scores = torch.tensor([score for score, _ in scored], dtype=torch.float32)

        rewards = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        # A response without tokens has no last one, and position -1 would be padding.
        rows = (lengths > 0).nonzero(as_tuple=True)[0]
        rewards[rows, lengths[rows] - 1] = scores.to(responses.device)[rows]
        self._show_examples(data, samples, scored)
        extra_info = _as_columns([extras for _, extras in scored])
        return RewardResult(reward_tensor=rewards, reward_extra_info=extra_info)

    def _samples(self, data: DataProto, lengths: list[int]) -> list[Sample]:
        columns = data.non_tensor_batch
        _require_column(columns, self.reward_fn_key, "named by data.reward_fn_key")
        _require_column(columns, "reward_model", "which holds the ground truth")
        return [
            Sample(
                row=row,
                uid=columns["uid"][row] if "uid" in columns else None,
                data_source=columns[self.reward_fn_key][row],
                response=self._response_text(_tensor(data, "responses")[row, :length]),
                response_length=length,
                ground_truth=_ground_truth(columns["reward_model"][row], row),
                extra_info=_extra_info(columns, row),
            )
            for row, length in enumerate(lengths)
        ]

    def _call(self, sample: Sample) -> Any:
        try:
            return self.compute_score(
                data_source=sample.data_source,
                solution_str=sample.response,
                ground_truth=sample.ground_truth,
                extra_info=sample.extra_info,
                **self.reward_kwargs,
            )
        except CalderaError:
            raise  # says already what is wrong
        except Exception as error:
            raise sample.error(_failure(error)) from error

    def _judge(self, sample: Sample, returned: Any) -> tuple[float, dict[str, Any]]:
        """The reward of a sample, and what is recorded about it."""
        return _read_score(sample, returned)

    def _show_examples(
        self, data: DataProto, samples: list[Sample], scored: list[tuple[float, dict[str, Any]]]
    ) -> None:
        console = Console()
        shown: Counter[str] = Counter()
        for sample, (score, extras) in zip(samples, scored, strict=True):
            if shown[sample.data_source] >= self.num_examine:
                continue
            shown[sample.data_source] += 1
            lines = {
                "prompt": self._decode(_prompt_ids(data, sample.row)),
                "response": sample.response,
                "ground_truth": sample.ground_truth,
                "score": score,
            }
            for name, value in (lines | extras).items():
                console.print(f"[{name}] {value}", markup=False, highlight=False, soft_wrap=True)

    def _response_text(self, token_ids: torch.Tensor) -> str:
        return self._decode(token_ids)

    def _decode(self, token_ids: torch.Tensor) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _tensor(data: DataProto, key: str) -> torch.Tensor:
    assert data.batch is not None, "a batch without tensors has nothing to score"
    tensor: torch.Tensor = data.batch[key]
    return tensor


def _given_scores(data: DataProto) -> RewardResult:
    """The scores that a reward model or an agent loop has written already."""
    extra_keys = data.meta_info.get("reward_extra_keys", [])
    return RewardResult(
        reward_tensor=_tensor(data, "rm_scores"),
        reward_extra_info={key: data.non_tensor_batch[key].tolist() for key in extra_keys},
    )


def _require_column(columns: Mapping[str, np.ndarray], name: str, role: str) -> None:
    if name not in columns:
        there = ", ".join(sorted(columns)) or "no columns"
        raise DataError(f"scoring needs the column {name!r}, {role}; the data has {there}")


def _prompt_ids(data: DataProto, row: int) -> torch.Tensor:
    prompt = _tensor(data, "prompts")[row]  # (P,), padded on the left
    length = int(_tensor(data, "attention_mask")[row, : len(prompt)].sum())
    return prompt[len(prompt) - length :]


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
        name: _plain(columns[column][row])
        for column, name in ROLLOUT_COLUMNS.items()
        if column in columns
    }
    return dict(own or {}) | added


def _read_score(sample: Sample, returned: Any) -> tuple[float, dict[str, Any]]:
    """The score in what a score function returned (or raised), and all that it said."""
    if isinstance(returned, CalderaError):
        raise returned
    if isinstance(returned, BaseException):
        raise sample.error(_failure(returned)) from returned
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "nothing"
            raise sample.error(f"the score function returned a dict without 'score', with {keys}")
        extras = {str(key): _plain(value) for key, value in returned.items()}
        score = extras["score"]
    else:
        score = _plain(returned)
        extras = {"acc": score}  # the variable that validation reports first
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise sample.error(f"the score must be a finite number, and is {score!r}")
    return float(score), extras


def _failure(error: BaseException) -> str:
    return f"the score function raised {type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as the Python number that it holds; anything else as it is."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


def _as_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)  # in the order they first come
    return {name: [row.get(name) for row in rows] for name in names}
