"""Padded rows to packed tokens and back, by hand."""

from __future__ import annotations

import pytest
import torch

from caldera.engine.packed_model import pack_ends, pack_rows
from caldera.models.attention import PackedSequences
from caldera.models.ulysses import SequenceGroup
from caldera.protocol import DataProto

CPU = torch.device("cpu")


def rows() -> DataProto:
    """P = 3, R = 3. Row 0: `1 2 | 3 4`; row 1: `5 | 6 [7] 8` with a tool token; row 2: `9 |`."""
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 1, 2, 3, 4, 0], [0, 0, 5, 6, 7, 8], [0, 0, 9, 0, 0, 0]]),
            "attention_mask": torch.tensor(
                [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]]
            ),
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]),
        }
    )


def test_padding_is_gone() -> None:
    packed = pack_rows(rows(), CPU)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert isinstance(packed.context, PackedSequences)
    assert packed.context.lengths == [4, 4, 1]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0]]


def test_every_answer_token_is_predicted_from_the_one_before() -> None:
    packed = pack_rows(rows(), CPU)
    assert packed.labels.tolist() == [3, 4, 6, 8]
    assert packed.predictors.tolist() == [1, 2, 4, 6]  # the tokens 2, 3, 5 and 7
    assert packed.cells.tolist() == [0, 1, 3, 5]
    assert packed.shape == (3, 3)


def test_unpacking_puts_zeros_elsewhere() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    matrix = pack_rows(rows(), CPU).unpack(values)
    assert matrix.tolist() == [[1, 2, 0], [3, 0, 4], [0, 0, 0]]
    assert matrix.dtype == torch.float64
    (matrix * torch.arange(9).view(3, 3)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 1, 3, 5]


def test_scores_are_read_at_the_last_token_of_each_answer() -> None:
    batch = rows()
    batch.batch["responses"] = batch.batch["input_ids"][:, 3:]
    packed = pack_ends(batch, CPU)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert packed.predictors.tolist() == [3, 7]  # the tokens 4 and 8; `9` has no answer
    assert packed.unpack(torch.tensor([1.5, 2.5])).tolist() == [[0, 1.5, 0], [0, 0, 2.5], [0] * 3]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_tokens(size: int) -> None:
    """Nine tokens are filled up with a sequence that nobody reads, and cut."""
    whole = pack_rows(rows(), CPU)
    parts = [pack_rows(rows(), CPU, SequenceGroup(rank, size)) for rank in range(size)]
    ids = torch.cat([part.input_ids for part in parts], 1)[0].tolist()
    assert ids == [*range(1, 10)] + [0] * (-9 % size)
    assert torch.cat([part.labels for part in parts]).tolist() == whole.labels.tolist()
    for rank, part in enumerate(parts):
        assert part.counts == [len(other.labels) for other in parts]
        assert part.input_ids[0, part.predictors].tolist() == [
            whole.input_ids[0, place].item()
            for place in whole.predictors.tolist()
            if place // len(part.input_ids[0]) == rank
        ]
        assert part.cells.tolist() == whole.cells.tolist()
