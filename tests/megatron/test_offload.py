"""What Megatron gives back between phases changes no number: every choice of it, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.offload_trials import (
    ACTOR,
    REF,
    assert_same,
    combinations,
    ranks_meet,
    save_model,
    trial,
)
from tests.rank_processes import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]
Case = tuple[str, tuple[str, ...]]
CASES: list[Case] = [
    (kind, choice)
    for kind, role in (("actor", ACTOR), ("critic", "critic"))
    for choice in combinations(
        *(f"{role}.megatron.{part}_offload" for part in ("param", "grad", "optimizer"))
    )
]
ALONE = f"{REF}.megatron.param_offload"  # else the reference follows the actor
CASES += [("actor", (ALONE,))]


def overrides(kind: str, choice: tuple[str, ...]) -> list[str]:
    role = ACTOR if kind == "actor" else "critic"
    return [
        f"{role}.strategy=megatron",
        *(f"{key}=True" for key in choice),
    ]


def run_rank(rank: int, folder: Path) -> None:
    found = {}
    with ranks_meet(rank, 2, folder):
        for number, case in enumerate(CASES):
            saved = folder / f"checkpoint_{number}"
            found[case] = trial(folder / "model", case[0], overrides(*case), saved)
    torch.save(found, folder / f"found_{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    save_model(folder / "model")
    return run_ranks(__file__, 2, folder, "caldera.workers")


@pytest.mark.parametrize(("kind", "choice"), CASES)
def test_offloading_changes_no_number(
    found: list[dict[Case, Any]], kind: str, choice: tuple[str, ...]
) -> None:
    for rank in found:
        assert_same(rank[kind, choice], rank[kind, ()])


if __name__ == "rank":
    run_rank(RANK, FOLDER)  # type: ignore[name-defined]  # noqa: F821  # given by the parent
