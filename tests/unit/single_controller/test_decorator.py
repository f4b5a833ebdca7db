"""What `register` notes on a method, and the modes there are."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import torch

from caldera.errors import ConfigError, RegistryError
from caldera.protocol import DataProto, DataProtoFuture
from caldera.single_controller import (
    Dispatch,
    Execute,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from caldera.single_controller.decorator import functions_of, registration_of

NAMES = [
    "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO",
    "DP_COMPUTE_PROTO_WITH_FUNC", "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
]  # fmt: skip


@pytest.fixture
def own_mode() -> Any:
    mode = register_dispatch_mode("EVERY_OTHER")
    yield mode
    del Dispatch._known["EVERY_OTHER"]


def future_of(data: DataProto) -> DataProtoFuture:
    return DataProtoFuture.concat([data])


def test_the_modes() -> None:
    assert [mode.name for mode in Dispatch] == NAMES
    assert all(getattr(Dispatch, name) == mode for name, mode in zip(NAMES, Dispatch, strict=True))
    assert repr(Dispatch.ONE_TO_ALL) == "Dispatch.ONE_TO_ALL"
    assert pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL)) == Dispatch.ONE_TO_ALL
    with pytest.raises(AttributeError, match=r"no mode 'ONE_TO_NONE' \(known: RANK_ZERO, "):
        Dispatch.ONE_TO_NONE  # noqa: B018


def test_a_mode_of_ones_own(own_mode: Dispatch) -> None:
    assert Dispatch.EVERY_OTHER is own_mode
    with pytest.raises(RegistryError, match="EVERY_OTHER does nothing yet"):
        functions_of(own_mode)
    update_dispatch_mode(own_mode, dispatch_fn=max, collect_fn=min)
    assert functions_of(own_mode) == (max, min)
    with pytest.raises(RegistryError, match="'EVERY_OTHER' is registered already"):
        register_dispatch_mode("EVERY_OTHER")
    with pytest.raises(RegistryError, match=r"Dispatch\.UNKNOWN is no dispatch mode"):
        update_dispatch_mode(Dispatch("UNKNOWN"), max, min)


def test_register_leaves_a_note() -> None:
    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, blocking=False, needs=["responses"])
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8
    assert double.__name__ == "double"
    assert double.attrs_3141562937 == {  # type: ignore[attr-defined]
        "dispatch_mode": Dispatch.ONE_TO_ALL,
        "execute_mode": Execute.RANK_ZERO,
        "blocking": False,
        "materialize_futures": True,
        "needs": ("responses",),
        "balance": True,
        "in_mini_batches": False,
    }
    assert registration_of(len) is None


def test_register_alone() -> None:
    @register()
    def work() -> None: ...

    found = registration_of(work)
    assert found is not None
    assert (found.dispatch_mode, found.execute_mode) == (Dispatch.ALL_TO_ALL, Execute.ALL)
    assert (found.blocking, found.materialize_futures, found.needs) == (True, True, None)


@pytest.mark.parametrize(
    "mode", ["ONE_TO_ALL", {}, {"dispatch_fn": max}, {"dispatch_fn": 1, "collect_fn": 2}]
)
def test_what_is_no_mode(mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"^register: dispatch_mode=.* none of RANK_ZERO, "):
        register(dispatch_mode=mode)


def test_futures_are_waited_for() -> None:
    data = DataProto.from_dict({"x": torch.tensor([1, 2])})

    @register()
    def waits(first: Any, *, second: Any, third: Any) -> Any:
        return first, second, third

    @register(materialize_futures=False)
    def takes(value: Any) -> Any:
        return value

    @register()
    async def waits_too(value: Any) -> Any:
        return value

    first, second, third = waits(future_of(data), second=future_of(data), third=3)
    assert [type(value) for value in (first, second, third)] == [DataProto, DataProto, int]
    future = future_of(data)
    assert takes(future) is future
    assert isinstance(asyncio.run(waits_too(future_of(data))), DataProto)
