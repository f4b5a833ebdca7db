"""GRPO whose answers SGLang samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine_trials import assert_trains_an_adapter, assert_trains_on_two_ranks, python_of

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.slow


def test_an_adapter(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_trains_an_adapter(
        lab, tmp_path, monkeypatch, "actor_rollout_ref.rollout.name=sglang",
        f"actor_rollout_ref.rollout.engine_python={python_of('sglang')}", is_merged=True,
    )  # fmt: skip


def test_an_engine_over_the_devices_of_two_ranks(lab: Lab, tmp_path: Path) -> None:
    assert_trains_on_two_ranks(lab, tmp_path, "sglang")
