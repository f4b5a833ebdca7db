"""Parameters and optimisers that wait in host memory change no number: fsdp and fsdp2 on two ranks.

Two processes are started once, and do the same with every choice of what is offloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload_trials import (
    ACTOR,
    REF,
    assert_same,
    combinations,
    moves_are_real,
    ranks_meet,
    save_model,
    trial,
)
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.timeout(600)  # the first test waits for all that the processes do
STRATEGIES = {
    "fsdp": ("strategy=fsdp",),
    "fsdp, parameters apart": ("strategy=fsdp", "fsdp_config.use_orig_params=True"),
    "fsdp in bfloat16": ("strategy=fsdp", "fsdp_config.dtype=bfloat16"),
    "fsdp2": ("strategy=fsdp2",),
}
MEMORY = f"{ACTOR}.fsdp_config"
CRITIC = "critic.model.fsdp_config"
CHOICES = {
    "actor": combinations(
        f"{MEMORY}.param_offload", f"{MEMORY}.optimizer_offload", f"{REF}.fsdp_config.param_offload"
    ),
    "critic": combinations(f"{CRITIC}.param_offload", f"{CRITIC}.optimizer_offload"),
}
LORA = "actor_rollout_ref.model.lora_rank=4"
Case = tuple[str, str, tuple[str, ...]]
CASES: list[Case] = [
    *((name, "actor", choice) for name in ("fsdp", "fsdp2") for choice in CHOICES["actor"]),
    *((name, "critic", choice) for name in ("fsdp", "fsdp2") for choice in CHOICES["critic"]),
    *(
        (name, "actor", CHOICES["actor"][place])
        for name in ("fsdp, parameters apart", "fsdp in bfloat16")
        for place in (0, -1)
    ),
    *(("fsdp", "LoRA", CHOICES["actor"][place]) for place in (0, -1)),
]


def overrides(name: str, kind: str, choice: tuple[str, ...]) -> list[str]:
    given = [f"{ACTOR}.{setting}" for setting in STRATEGIES[name]]
    if kind == "critic":
        given = [
            f"critic.{s}".replace("critic.fsdp", "critic.model.fsdp") for s in STRATEGIES[name]
        ]
    return [*given, *(f"{key}=True" for key in choice), *([LORA] if kind == "LoRA" else [])]


def run_rank(rank: int, folder: Path) -> None:
    found = {}
    with ranks_meet(rank, 2, folder), moves_are_real():
        for number, case in enumerate(CASES):
            saved = folder / f"checkpoint_{number}"
            found[case] = trial(folder / "model", case[1], overrides(*case), saved)
    torch.save(found, folder / f"found_{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    save_model(folder / "model")
    return run_ranks(__file__, 2, folder, "caldera.workers")


@pytest.mark.parametrize(("name", "kind", "choice"), CASES)
def test_offloading_changes_no_number(
    found: list[dict[Case, Any]], name: str, kind: str, choice: tuple[str, ...]
) -> None:
    for rank in found:
        assert_same(rank[name, kind, choice], rank[name, kind, ()])


if __name__ == "rank":
    run_rank(RANK, FOLDER)  # type: ignore[name-defined]  # noqa: F821  # given by the parent
