from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import BatchData, DataProto

AssertSame = Callable[[DataProto, DataProto], None]


class Keys(list[str]):
    """Metadata of rows that are kept elsewhere."""

    def chunk(self, chunks: int) -> list[Keys]:
        return [Keys(self[i::chunks]) for i in range(chunks)]

    @classmethod
    def concat(cls, parts: list[Keys]) -> Keys:
        return cls(key for part in parts for key in part)


@pytest.fixture
def tensor_dict() -> TensorDict:
    """Four rows: numbers, ragged tokens, names, and one temperature."""
    rows = [torch.arange(length) for length in (1, 3, 2, 2)]
    batch = TensorDict({"x": torch.arange(4)}, [4])
    batch.set("ragged", torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    batch.set("name", NonTensorStack(*map(NonTensorData, ["a", "a", None, "d"])))
    number: Any = NonTensorData(0.5)
    batch.set("temperature", number)
    return batch


def plain(batch: TensorDict) -> dict[str, Any]:
    ragged = [row.tolist() for row in batch["ragged"].unbind()]
    return {"x": batch["x"].tolist(), "ragged": ragged, "name": batch.get("name").tolist(),
            "temperature": batch["temperature"]}  # fmt: skip


def test_dataproto(data: DataProto, assert_same: AssertSame) -> None:
    parts = BatchData(data).chunk(2)
    assert len(BatchData(data)) == 4
    assert_same(parts[1], data[2:])
    assert_same(BatchData.concat(parts), data)
    assert_same(BatchData.concat([*map(BatchData, parts)]), data)


def test_tensordict(tensor_dict: TensorDict) -> None:
    parts = BatchData(tensor_dict).chunk(2)
    assert len(BatchData(tensor_dict)) == 4
    assert [plain(part) for part in parts] == [
        {"x": [0, 1], "ragged": [[0], [0, 1, 2]], "name": ["a", "a"], "temperature": 0.5},
        {"x": [2, 3], "ragged": [[0, 1], [0, 1]], "name": [None, "d"], "temperature": 0.5},
    ]
    assert plain(BatchData.concat(parts)) == plain(tensor_dict)


def test_tensordicts_follow_the_rules_of_dataproto(tensor_dict: TensorDict) -> None:
    with pytest.raises(ProtocolError, match="4 rows do not make 3 equal chunks"):
        BatchData(tensor_dict).chunk(3)
    flag: Any = NonTensorData(True)
    tensor_dict.set("_verl_auto_padding", flag)
    assert [len(part) for part in BatchData(tensor_dict).chunk(3)] == [2, 1, 1]
    answers = [TensorDict({"metrics": NonTensorData({"loss": n})}, [0]) for n in (1.0, 2.0)]
    assert BatchData.concat(answers)["metrics"] == {"loss": [1.0, 2.0]}


def test_metadata() -> None:
    parts = BatchData(Keys(["a", "b", "c"])).chunk(2)
    assert parts == [["a", "c"], ["b"]]
    assert BatchData.concat(parts) == ["a", "c", "b"]
    assert len(BatchData(Keys("ab"))) == 2


def test_unusable(data: DataProto, tensor_dict: TensorDict) -> None:
    with pytest.raises(ProtocolError, match=r"a list is no DataProto .* has no chunk, concat"):
        BatchData([1])
    with pytest.raises(ProtocolError, match="nothing to concatenate"):
        BatchData.concat([])
    with pytest.raises(ProtocolError, match="kinds DataProto, TensorDict"):
        BatchData.concat([data, tensor_dict])
    with pytest.raises(ProtocolError, match="a int is no DataProto"):
        BatchData.concat([1, 2])
