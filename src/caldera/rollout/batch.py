"""Between batches and requests: padded tensors on one side, token lists on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caldera.data.loader import compute_position_ids, right_pad
from caldera.errors import ProtocolError, RolloutError
from caldera.protocol import DataProto
from caldera.rollout.base import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from caldera.config import RolloutConfig


def requests_from_batch(
    prompts: DataProto, config: RolloutConfig, eos_token_ids: Iterable[int], seeds: Sequence[int]
) -> list[Request]:
    """One request a row, from `raw_prompt_ids` where the batch has them, else from `input_ids`."""
    if len(seeds) != len(prompts):
        raise ProtocolError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
    params = sampling_params(prompts.meta_info, config, eos_token_ids)
    return [
        Request(ids, replace(params, max_tokens=_max_tokens(len(ids), config)), seed)
        for ids, seed in zip(_prompt_ids(prompts), seeds, strict=True)
    ]


def sampling_params(
    meta: Mapping[str, Any], config: RolloutConfig, eos_token_ids: Iterable[int]
) -> SamplingParams:
    """The sampling parameters of a batch.

    `validate` in the meta information samples with `val_kwargs`; `do_sample` and `temperature`
    override the config's. Stop tokens and strings are the same in both.
    """
    defaults = config.val_kwargs if meta.get("validate", False) else config
    do_sample = meta.get("do_sample", defaults.do_sample)
    temperature = meta.get("temperature", defaults.temperature) if do_sample else 0.0
    return SamplingParams(
        max_tokens=config.response_length,
        temperature=float(temperature),
        top_k=int(defaults.top_k),
        top_p=float(defaults.top_p),
        min_p=float(defaults.min_p),
        repetition_penalty=float(defaults.repetition_penalty),
        presence_penalty=float(defaults.presence_penalty),
        frequency_penalty=float(defaults.frequency_penalty),
        stop_token_ids=frozenset(eos_token_ids) | frozenset(config.stop_token_ids or ()),
        ignore_eos=config.ignore_eos,
        stop=tuple(config.stop or ()),
    )


def _max_tokens(prompt_length: int, config: RolloutConfig) -> int:
    longest = config.longest_sequence
    room = longest - prompt_length
    if room < 1:
        raise RolloutError(
            f"a prompt of {prompt_length} tokens leaves no room for a response: "
            f"rollout.max_model_len is {longest}"
        )
    return min(config.response_length, room)


def _prompt_ids(prompts: DataProto) -> list[list[int]]:
    if "raw_prompt_ids" in prompts.non_tensor_batch:
        return [[int(token) for token in row] for row in prompts.non_tensor_batch["raw_prompt_ids"]]
    rows, mask = _tensor(prompts, "input_ids"), _tensor(prompts, "attention_mask")
    return [row[kept.bool()].tolist() for row, kept in zip(rows.cpu(), mask.cpu(), strict=True)]


def completions_to_batch(
    prompts: DataProto,
    completions: Sequence[Completion],
    response_length: int,
    pad_token_id: int,
    calculate_log_probs: bool,
) -> DataProto:
    """The batch of prompts and responses, padded: P tokens left, `response_length` right.

    Adds prompts, responses, input_ids, attention_mask, position_ids, response_mask and, where
    asked for, rollout_log_probs.
    """
    if len(completions) != len(prompts):
        raise ProtocolError(f"{len(prompts)} prompts, but {len(completions)} completions")
    prompt_ids, prompt_mask = _tensor(prompts, "input_ids"), _tensor(prompts, "attention_mask")
    for row, completion in enumerate(completions):
        if len(completion.token_ids) > response_length:
            raise ProtocolError(
                f"completion {row} has {len(completion.token_ids)} tokens, "
                f"the batch has room for {response_length}"
            )
    device = prompt_ids.device
    tokens = [completion.token_ids for completion in completions]
    responses = right_pad(tokens, response_length, pad_token_id).to(device)  # (B, R)
    lengths = torch.tensor([len(row) for row in tokens], device=device)[:, None]
    response_mask = (torch.arange(response_length, device=device) < lengths).long()  # (B, R)
    attention_mask = torch.cat([prompt_mask.to(torch.int64), response_mask], dim=1)  # (B, P + R)
    tensors = {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_ids(attention_mask),
        "response_mask": response_mask,
    }
    if calculate_log_probs:
        log_probs = [completion.log_probs for completion in completions]
        padded = right_pad(log_probs, response_length, 0.0, torch.float32)
        tensors["rollout_log_probs"] = padded.to(device)
    return DataProto.from_dict(tensors=tensors)


def _tensor(prompts: DataProto, key: str) -> Tensor:
    if prompts.batch is None or key not in prompts.batch.keys():  # noqa: SIM118 (a TensorDict)
        raise ProtocolError(f"a batch of prompts needs the tensor {key!r}")
    tensor = prompts.batch[key]
    assert isinstance(tensor, Tensor)
    return tensor
