from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import DataProto, DataProtoConfig


def names(data: DataProto) -> str:
    return "".join(data.non_tensor_batch["name"])


def first_tokens(data: DataProto) -> list[int]:
    assert data.batch is not None
    return [int(token) for token in data.batch["tokens"][:, 0]]


def assert_rows(data: DataProto, expected: str) -> None:
    """Tensors, object columns and number columns hold the rows of these names."""
    rows = ["abcd".index(name) for name in expected]
    assert names(data) == expected
    assert first_tokens(data) == [2 * row for row in rows]
    assert data.non_tensor_batch["turns"].tolist() == [row + 1 for row in rows]
    assert data.non_tensor_batch["turns"].dtype == np.int32
    assert data.meta_info["temperature"] == 0.7


def test_length() -> None:
    assert len(DataProto()) == 0
    assert len(DataProto(non_tensor_batch={"x": np.zeros((3, 2))})) == 3
    assert len(DataProto(TensorDict({}, [5]))) == 5


def test_consistency_needs_one_batch_dimension() -> None:
    with pytest.raises(ProtocolError, match=r"one batch dimension.*\(2, 3\)"):
        DataProto(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", "b"], r"\['uid'\] is a list, not a numpy array"),
        (np.array(["a", "b"]), r"\['uid'\] has shape \(2,\), but there are 3 rows"),
        (np.array("a"), r"\['uid'\] has shape \(\), but there are 3 rows"),
    ],
)
def test_consistency_of_columns(column: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        DataProto(TensorDict({"x": torch.zeros(3)}, [3]), {"uid": column})


def test_consistency_without_tensors() -> None:
    with pytest.raises(ProtocolError, match=r"'y'\] has shape \(2,\), but there are 3 rows"):
        DataProto(non_tensor_batch={"x": np.zeros(3), "y": np.zeros(2)})


@pytest.mark.parametrize("index", [1, -3, np.int64(1)])
def test_integer_index_is_one_row(data: DataProto, index: int) -> None:
    item = data[index]
    assert item.batch is not None
    assert item.batch.batch_size == torch.Size([])
    assert item.batch["tokens"].tolist() == [2, 3]
    assert item.non_tensor_batch == {"name": "b", "turns": 2}
    assert item.meta_info == {"temperature": 0.7}


def test_iteration_gives_rows(data: DataProto) -> None:
    assert [item.non_tensor_batch["name"] for item in data] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("index", [4, -5])
def test_row_out_of_range(data: DataProto, index: int) -> None:
    with pytest.raises(ProtocolError, match=f"no row {index} in 4 rows"):
        data[index]
    with pytest.raises(ProtocolError, match=f"select_idxs: there is no row {index} in 4 rows"):
        data[[0, index]]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), "bc"),
        (slice(None, None, 2), "ac"),
        (slice(1, None, 2**62), "b"),
        (slice(-100, 100, np.int64(3)), "ad"),
        (slice(None, None, -1), "dcba"),
        (slice(-1, 0, -2), "db"),
        (slice(3, 1), ""),
        ([3, 0, 0, -1], "daad"),
        ([], ""),
        (range(2), "ab"),
        ((2, 1), "cb"),
        ([True, False, False, True], "ad"),
        (np.array([2, 1], np.int32), "cb"),
        (np.array([False, True, False, True]), "bd"),
        (torch.tensor([2, 1]), "cb"),
        (torch.tensor([False, False, False, False]), ""),
        (torch.tensor([1, 0, 0, 1], dtype=torch.bool), "ad"),
    ],
)
def test_row_selection(data: DataProto, index: Any, expected: str) -> None:
    assert_rows(data[index], expected)


def test_row_selection_without_tensors() -> None:
    data = DataProto.from_dict(non_tensors={"name": ["a", "b", "c"]})
    assert names(data[1:]) == "bc"
    assert names(data[np.array([True, False, True])]) == "ac"
    assert names(data.repeat(2)) == "aabbcc"
    assert data[0].batch is None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([True, False], "a mask of 2 rows for 4 rows"),
        (torch.zeros(2, 2, dtype=torch.long), r"1-D .* shape \(2, 2\)"),
        ([0.5], "integers or booleans, not a list of .* dtype float64"),
        ("ab", "not a str"),
    ],
)
def test_unusable_row_selection(data: DataProto, index: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        data.select_idxs(index)


def test_slices_share_memory_but_not_keys(data: DataProto) -> None:
    part = data.slice(2)
    assert part.batch is not None and data.batch is not None
    part.batch["tokens"][0] = -1
    assert data.batch["tokens"][2].tolist() == [-1, -1]
    part.batch["new"] = torch.zeros(2)
    part.meta_info["new"] = 1
    part.non_tensor_batch["new"] = np.zeros(2)
    assert "new" not in {*data.batch.keys(), *data.meta_info, *data.non_tensor_batch}


def test_reorder_is_in_place(data: DataProto) -> None:
    data.reorder(torch.tensor([2, 0, 3, 1]))
    assert_rows(data, "cadb")


@pytest.mark.parametrize("indices", [[0, 1, 2], [0, 0, 1, 2], [0, 1, 2, 3, 0]])
def test_reorder_takes_permutations_only(data: DataProto, indices: list[int]) -> None:
    with pytest.raises(ProtocolError, match="no permutation of 4 rows"):
        data.reorder(indices)


def test_repeat(data: DataProto) -> None:
    assert_rows(data[:2].repeat(), "aabb")
    assert_rows(data[:2].repeat(3, interleave=False), "ababab")
    assert_rows(data.repeat(0), "")
    with pytest.raises(ProtocolError, match="repeat_times=-1"):
        data.repeat(-1)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_sample_level_repeat(data: DataProto, kind: Any) -> None:
    assert_rows(data.sample_level_repeat(kind([2, 0, 1, 3])), "aacddd")


@pytest.mark.parametrize("counts", [[1, 2], [1, 1, 1, -1], [True] * 4])
def test_sample_level_repeat_needs_one_count_for_each_row(data: DataProto, counts: Any) -> None:
    with pytest.raises(ProtocolError, match="4 rows; there must be one non-negative integer"):
        data.sample_level_repeat(counts)


@pytest.mark.parametrize(("candidate", "expected"), [("first", "abcdaa"), ("", "abcddd")])
def test_padding_is_in_place(data: DataProto, candidate: str, expected: str) -> None:
    data.padding(2, candidate)
    assert_rows(data, expected)


def test_padding_by_nothing(data: DataProto) -> None:
    data.padding(0)
    assert_rows(data, "abcd")
    empty = data[:0]
    empty.padding(0)
    assert_rows(empty, "")


def test_unusable_padding(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="padding_candidate='middle'"):
        data.padding(1, "middle")
    with pytest.raises(ProtocolError, match="cannot append -1 rows to 4 rows"):
        data.padding(-1)
    with pytest.raises(ProtocolError, match="cannot append 1 rows to 0 rows"):
        data[:0].padding(1)


def test_chunk(data: DataProto) -> None:
    first, second = data.chunk(2)
    assert_rows(first, "ab")
    assert_rows(second, "cd")


def test_chunk_needs_equal_parts(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="chunk: 4 rows do not make 3 equal chunks"):
        data.chunk(3)
    with pytest.raises(ProtocolError, match="cannot make 0 chunks"):
        data.chunk(0)


@pytest.mark.parametrize(("chunks", "expected"), [(3, ["ab", "c", "d"]), (5, [*"abcd", ""])])
def test_chunk_with_auto_padding(data: DataProto, chunks: int, expected: list[str]) -> None:
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    assert [names(part) for part in data.chunk(chunks)] == expected


def test_split(data: DataProto) -> None:
    assert [names(part) for part in data.split(3)] == ["abc", "d"]
    assert [names(part) for part in data.split(9)] == ["abcd"]
    with pytest.raises(ProtocolError, match="cannot split by 0 rows"):
        data.split(0)


def test_iterator_in_order(data: DataProto) -> None:
    batches = list(data.make_iterator(mini_batch_size=2, epochs=2))
    assert [names(batch) for batch in batches] == ["ab", "cd", "ab", "cd"]
    assert_rows(batches[1], "cd")
    assert batches[0].meta_info == {"temperature": 0.7}


def shuffled(data: DataProto, seed: int | None) -> list[str]:
    iterator = data.make_iterator(2, 3, seed, {"shuffle": True})
    return [names(batch) for batch in iterator]


def test_shuffled_iterator_has_the_order_of_a_torch_loader(data: DataProto) -> None:
    data = data.repeat(8)
    generator = torch.Generator().manual_seed(5)
    letters: Any = list("aaaaaaaabbbbbbbbccccccccdddddddd")
    loader: Any = torch.utils.data.DataLoader(letters, 2, shuffle=True, generator=generator)
    assert shuffled(data, 5) == ["".join(pair) for _ in range(3) for pair in loader]


def test_unseeded_iterator_follows_the_global_generator(data: DataProto) -> None:
    data = data.repeat(8)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, second = shuffled(data, None), shuffled(data, None)
        assert first != second
        torch.manual_seed(1)
        assert shuffled(data, None) == first


@pytest.mark.parametrize("seed", [0, 7])
def test_shuffled_iterator_depends_on_the_seed_alone(data: DataProto, seed: int | None) -> None:
    data = data.repeat(8)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = shuffled(data, seed)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert shuffled(data, seed) == first


def test_shuffled_iterator_draws_every_epoch_anew(data: DataProto) -> None:
    data = data.repeat(8)
    order = "".join(shuffled(data, 3))
    epochs = [order[:32], order[32:64], order[64:]]
    assert all(sorted(epoch) == sorted("abcd" * 8) for epoch in epochs)
    assert len(set(epochs)) == 3
    assert "".join(shuffled(data, 4)) != order


def test_shuffled_iterator_keeps_rows_together(data: DataProto) -> None:
    for batch in data.make_iterator(4, 2, 0, {"shuffle": True}):
        assert_rows(batch, names(batch))


def test_iterator_checks_before_the_first_batch(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="4 rows do not make mini-batches of 3"):
        data.make_iterator(3, 1)
    with pytest.raises(ProtocolError, match="dataloader_kwargs must not have 'collate_fn'"):
        data.make_iterator(2, 1, dataloader_kwargs={"collate_fn": list})
    with pytest.raises(TypeError, match="shufle"):
        data.make_iterator(2, 1, dataloader_kwargs={"shufle": True})


def test_iterator_takes_other_options_of_a_loader(data: DataProto) -> None:
    reversed_rows = {"sampler": [3, 2, 1, 0]}
    assert [names(part) for part in data.make_iterator(2, 2, 0, reversed_rows)] == [
        "dc", "ba", "dc", "ba",
    ]  # fmt: skip
    shuffle = {"shuffle": True}
    in_workers = {"shuffle": True, "num_workers": 1, "multiprocessing_context": "fork"}
    assert [names(part) for part in data.make_iterator(2, 1, 3, in_workers)] == [
        names(part) for part in data.make_iterator(2, 1, 3, shuffle)
    ]
    assert list(data[:0].make_iterator(2, 1, 3, shuffle)) == []
