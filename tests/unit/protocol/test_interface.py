"""The names and arguments that code written for verl relies on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import caldera
from caldera import protocol
from caldera.protocol import DataProto, DataProtoFuture

PAGE = Path(__file__).parents[3] / "docs/batch.md"
REQUIRED = inspect.Parameter.empty
KEYS = {"batch_keys": None, "non_tensor_batch_keys": None, "meta_info_keys": None}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (DataProto, {"batch": None, "non_tensor_batch": ..., "meta_info": ...}),
        (
            DataProto.from_single_dict,
            {"data": REQUIRED, "meta_info": None, "auto_padding": False},
        ),
        (
            DataProto.from_dict,
            {
                "tensors": None,
                "non_tensors": None,
                "meta_info": None,
                "num_batch_dims": 1,
                "auto_padding": False,
            },
        ),
        (DataProto.from_tensordict, {"data": REQUIRED}),
        (DataProto.select, {**KEYS, "deepcopy": False}),
        (DataProto.select_idxs, {"idxs": REQUIRED}),
        (DataProto.slice, {"start": None, "end": None, "step": None}),
        (DataProto.pop, KEYS),
        (DataProto.union, {"other": REQUIRED}),
        (
            DataProto.make_iterator,
            {
                "mini_batch_size": REQUIRED,
                "epochs": REQUIRED,
                "seed": None,
                "dataloader_kwargs": None,
            },
        ),
        (DataProto.padding, {"padding_size": REQUIRED, "padding_candidate": ""}),
        (DataProto.repeat, {"repeat_times": 2, "interleave": True}),
        (DataProto.unfold_column_chunks, {"n_split": REQUIRED, "split_keys": None}),
        (DataProto.print_size, {"prefix": ""}),
    ],
)
def test_arguments(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }
    assert [*found] == [*expected]
    assert all(found[name] == value for name, value in expected.items() if value is not ...)


def test_fields_of_a_future() -> None:
    assert [*inspect.signature(DataProtoFuture).parameters][:3] == [
        "collect_fn", "futures", "dispatch_fn",
    ]  # fmt: skip


def test_dataproto_is_found_at_the_top() -> None:
    assert caldera.DataProto is protocol.DataProto


def test_the_page_of_the_batch_names_everything() -> None:
    page = PAGE.read_text(encoding="utf-8")
    members = [name for name in dir(DataProto) if not name.startswith("_")]
    fields = ["batch", "non_tensor_batch", "meta_info"]
    for name in [*protocol.__all__, *members, *fields]:
        assert f"`{name}" in page, f"docs/batch.md does not name {name}"
