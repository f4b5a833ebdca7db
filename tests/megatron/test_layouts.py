"""A model that Megatron lays out trains as one that is whole: the same losses, norms and weights.

Four processes are started once. Rank 0 first trains alone with a plain engine, then two and four of
them train together in every layout, and what they found out is read by the tests below.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from tests.megatron import probes
from tests.megatron.trials import build_local, build_megatron, trial
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.megatron
Result = dict[Any, Any]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
EP = "expert_model_parallel_size"
PLAIN = {"use_distributed_optimizer": False}
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
BY_THREE = {"by_tokens": False, "micro_batch_size": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "matrices by 2": {"family": "qwen3", "layout": {TP: 2, "sequence_parallel": False}},
    "matrices and tokens by 2": {"family": "llama", "layout": {TP: 2}},
    "layers by 2": {"family": "qwen2", "layout": {PP: 2}, "kinds": ("actor", "critic", "reward")},
    "layers by 2, in turns": {"family": "qwen2", "layout": {PP: 2, VPP: 2}, "changes": BY_THREE},
    "rows by 2": {"family": "llama", "layout": OFFLOAD, "rests": True},
    "rows by 2, whole optimisers": {"family": "llama", "layout": PLAIN, "optim": "sgd"},
    "contexts by 2": {"family": "qwen3", "layout": {CP: 2}},
    "experts by 2": {"family": "qwen3_moe-unscaled", "layout": {EP: 2}},
    "matrices by 2, layers by 2": {
        "family": "qwen2",
        "layout": {TP: 2, PP: 2},
        "kinds": ("actor", "critic", "reward"),
        "ranks": 4,
    },
    "matrices by 2, rows by 2": {
        "family": "qwen3",
        "layout": {TP: 2, **OFFLOAD, **PLAIN},
        "rests": True,
        "ranks": 4,
    },
    "layers by 2 in turns, rows by 2": {"family": "qwen2", "layout": {PP: 2, VPP: 2}, "ranks": 4},
    "contexts by 2, matrices by 2": {"family": "qwen3", "layout": {CP: 2, TP: 2}, "ranks": 4},
    "experts by 2, matrices by 2": {"family": "qwen3_moe", "layout": {EP: 2, TP: 2}, "ranks": 4},
    "experts by 2, layers by 2": {"family": "mixtral", "layout": {EP: 2, PP: 2}, "ranks": 4},
}


def kinds_of(name: str) -> tuple[str, ...]:
    return tuple(LAYOUTS[name].get("kinds", ("actor", "critic")))


def alone_of(name: str, kind: str) -> tuple[str, str, str]:
    return LAYOUTS[name]["family"], kind, LAYOUTS[name].get("optim", "adam")


CASES = [(name, kind) for name in LAYOUTS for kind in kinds_of(name)]


# ---------------------------------------------------------------------- what ranks do


@contextmanager
def world(name: str, rank: int, ranks: int, folder: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / name}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=240),
    )  # fmt: skip
    yield
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def arrangement() -> Iterator[None]:
    """Megatron's groups of ranks are taken apart in the end."""
    from megatron.core import parallel_state

    yield
    parallel_state.destroy_model_parallel()


def run_rank(rank: int, folder: Path, only: str | None) -> None:
    """All that one process does."""
    torch.set_num_threads(1)
    chosen = [case for case in CASES if not only or only in case[0]]
    found: Result = {}
    if rank == 0:
        for case in sorted({alone_of(*case) for case in chosen}):
            engine = build_local(*case)
            found["alone", *case] = trial(engine, case[1]) | probes.averages_of(engine)
        expected = {} if only else probes.expected_of_plain_engines()
        torch.save(found | {"probes": expected}, folder / "alone.pt")
    for ranks in (2, 4):
        if rank >= ranks:
            continue
        with world(f"meeting_{ranks}", rank, ranks, folder):
            alone = torch.load(folder / "alone.pt", weights_only=False)
            for name, kind in chosen:
                told = LAYOUTS[name]
                if told.get("ranks", 2) != ranks:
                    continue
                family, _, optim = alone_of(name, kind)
                with arrangement():
                    engine = build_megatron(family, kind, told["layout"], optim)
                    result = trial(
                        engine, kind, told.get("rests", False), **told.get("changes", {})
                    )
                    if kind == "actor":
                        result |= probes.look(engine, alone["alone", *alone_of(name, kind)])
                    found[name, kind] = result
            for probe in [] if only or ranks != 2 else probes.PROBES:
                with arrangement():
                    found[probe.__name__] = probe(alone["probes"])
    torch.save(found, folder / f"found_{rank}.pt")


# ---------------------------------------------------------------------- what is found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """What each of the ranks found out."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(__file__, 4, folder, "caldera.engine", ONLY=os.environ.get("ONLY"))


def of_ranks(found: list[Result], name: str, kind: str) -> list[Result]:
    return [rank[name, kind] for rank in found[: LAYOUTS[name].get("ranks", 2)]]


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[1] != "reward"])
def test_it_trains_as_a_whole_model(found: list[Result], name: str, kind: str) -> None:
    alone = found[0]["alone", *alone_of(name, kind)]
    ranks = of_ranks(found, name, kind)
    speakers = [rank for rank in ranks if rank["place"][2]]
    assert sorted(rank["place"][0] for rank in speakers) == list(range(ranks[0]["place"][1]))
    for step, expected in enumerate(alone["curve"]):
        curves = [rank["curve"][step] for rank in speakers]
        means = {key: sum(c[key] for c in curves) / len(curves) for key in expected}
        assert means == pytest.approx(expected, rel=1e-5, abs=1e-5), f"step {step}"
    for rank in ranks:
        assert rank["rates"] == alone["rates"]
        assert list(rank["weights"]) == list(alone["weights"])
        for key, value in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][key], value, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_it_says_the_same_on_every_rank(found: list[Result], name: str, kind: str) -> None:
    alone = found[0]["alone", *alone_of(name, kind)]
    for rank in of_ranks(found, name, kind):
        place, copies = rank["place"][:2]
        rows = slice(place * 8 // copies, (place + 1) * 8 // copies)
        for when in ("first", "last") if kind != "reward" else ("first",):
            assert rank[when].keys() == alone[when].keys()
            for key, value in alone[when].items():
                torch.testing.assert_close(rank[when][key], value[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_holds_its_part(found: list[Result], name: str) -> None:
    """Parts of tensors and of Adam's averages, read and written by their Hugging Face names."""
    for rank in of_ranks(found, name, "actor"):
        assert rank["wrong shards"] == []
        assert rank["wrong averages"] == []
        assert rank["lost in writing"] == []


def test_the_models_learn(found: list[Result]) -> None:
    curve = found[0]["alone", "qwen2", "critic", "adam"]["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"] * 0.99


@pytest.mark.parametrize("probe", [probe.__name__ for probe in probes.PROBES])
def test_probe(found: list[Result], probe: str) -> None:
    assert [rank[probe] for rank in found[:2]] == [[], []]


if __name__ == "rank":
    run_rank(RANK, FOLDER, ONLY)  # type: ignore[name-defined]  # noqa: F821  # given by the parent
