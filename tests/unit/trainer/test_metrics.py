"""Timers, and one number from those of many ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from caldera.protocol import DataProto
from caldera.trainer.metrics import marked_timer, rank_metrics, reduce_metrics, with_role


def test_reduce_metrics() -> None:
    assert reduce_metrics(
        {
            "actor/pg_loss": [1.0, 2.0, 6.0],
            "perf/max_memory_allocated_gb": [1.0, 5.0, 3.0],
            "critic/score/min": [4.0, -1.0],
            "critic/score/max": [4.0, -1.0],
        }
    ) == {
        "actor/pg_loss": 3.0,
        "perf/max_memory_allocated_gb": 5.0,
        "critic/score/min": -1.0,
        "critic/score/max": 4.0,
    }


def test_of_ranks_the_mean_counts_but_of_peaks_the_highest() -> None:
    told = {
        "perf/max_memory_allocated_gb": [1.0, 3.0],
        "perf/cpu_memory_used_gb": [4.0, 2.0],
        "actor/ratio_min": [0.5, 0.25],
        "train/loss": [1.0, 2.0],
        "train/lr": 0.5,
    }
    assert rank_metrics(DataProto(meta_info={"metrics": told})) == {
        "perf/max_memory_allocated_gb": 3.0,
        "perf/cpu_memory_used_gb": 4.0,
        "actor/ratio_min": 0.25,
        "train/loss": 1.5,
        "train/lr": 0.5,
    }


def test_of_roles_the_highest_peak_counts() -> None:
    metrics = {"perf/cpu_memory_used_gb": 5.0, "critic/lr": 1.0}
    told = {"perf/cpu_memory_used_gb": [4.0, 2.0], "perf/max_memory_allocated_gb": [1.0, 3.0]}
    output = DataProto(meta_info={"metrics": told | {"actor/lr": 0.5}})
    assert with_role(metrics, output) == {
        "perf/cpu_memory_used_gb": 5.0,
        "perf/max_memory_allocated_gb": 3.0,
        "critic/lr": 1.0,
        "actor/lr": 0.5,
    }


def test_marked_timer_adds_up_and_survives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 12.5, 20.0, 21.0])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr("caldera.trainer.metrics.time", clock)
    timing: dict[str, float] = {}
    with marked_timer("gen", timing):
        pass
    assert timing == {"gen": 2.5}
    with pytest.raises(KeyError), marked_timer("gen", timing):
        raise KeyError
    assert timing == {"gen": 3.5}
