"""Comparing what was written with what the shards hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from caldera.errors import CheckpointError
from caldera.models.forward import base_module
from caldera.tracking.console import print_line
from caldera.trainer.merge_source import ATTENTION

ROWS, LENGTH = 2, 32
"""The shape of the probe."""


def load_folder(
    factory: Any, folder: Path, dtype: torch.dtype | str, trust_remote_code: bool
) -> nn.Module:
    """The folder's model as transformers loads it; nothing may be missing or left over."""
    try:
        model, told = factory.from_pretrained(
            str(folder), dtype=dtype, attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[kind]:
            names = ", ".join(sorted(str(one) for one in told[kind])[:3])
            raise CheckpointError(f"{folder}: {kind.replace('_', ' ')}: {names}")
    loaded: nn.Module = model.eval()
    return loaded


@torch.no_grad()
def probe_logits(module: nn.Module) -> Tensor:
    """Logits (B, T, V) of token ids that are always the same."""
    embedding = cast(nn.Embedding, base_module(module).get_input_embeddings())
    vocabulary = embedding.weight.shape[0]
    numbers = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    logits: Tensor = module(input_ids=numbers * 7919 % vocabulary).logits
    return logits


def compare_logits(written: Tensor, direct: Tensor, folder: Path) -> None:
    """Complain unless the logits of the folder's model are those of the shards, bit for bit."""
    difference = largest_difference(written, direct)
    dtype = str(direct.dtype).removeprefix("torch.")
    told = (
        f"logits of {ROWS} x {LENGTH} probe tokens in {dtype}, model of the folder against model "
        f"of the shards: largest difference {difference:g}"
    )
    if not torch.equal(written, direct):
        raise CheckpointError(f"{folder} is not what the checkpoint holds: {told}")
    print_line(f"Checked: {told}")


def compare_tensors(
    expected: Iterable[tuple[str, Tensor]],
    held: Iterable[str],
    read: Callable[[str], Tensor],
    folder: Path,
) -> None:
    """Complain unless the folder holds each tensor too, equal in the precision that it has there.

    `held` are the names of what it holds, all of which are to be expected.
    """
    left = set(held)
    worst, count, different = 0.0, 0, []
    for name, tensor in expected:
        if name not in left:
            raise CheckpointError(f"{folder} lacks {name}, which the checkpoint holds")
        left.remove(name)
        other = read(name)
        if other.shape != tensor.shape:
            raise CheckpointError(
                f"{folder}: {name} is {tuple(other.shape)}, in the checkpoint {tuple(tensor.shape)}"
            )
        count += 1
        if not torch.equal(other, tensor.to(other.dtype)):
            different.append(name)
            worst = max(worst, largest_difference(other, tensor))
    if left:
        raise CheckpointError(f"{folder} holds {min(left)}, which the checkpoint lacks")
    if different:
        raise CheckpointError(
            f"{folder} is not what the checkpoint holds: {len(different)} of {count} tensors "
            f"differ, {different[0]} first; the largest difference is {worst:g}"
        )
    print_line(f"Checked: {count} tensors of the checkpoint against {folder}: all are equal")


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Between elements at the same place."""
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
