"""Recordings of a GPU."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from caldera.config.profiling import GlobalTorchMemoryConfig, ProfilerConfig
from caldera.workers.profiling import Recorder, marked

pytestmark = pytest.mark.gpu


def record(tool: str, folder: Path) -> None:
    """A few kernels between the start and the stop of a recording."""
    config = ProfilerConfig(tool=tool, enable=True, all_ranks=True, save_path=str(folder))
    config.tool_config.torch_memory.trace_alloc_max_entries = 1000
    recorder = Recorder()
    recorder.start(config, GlobalTorchMemoryConfig(), "step_1/actor_rank_0")
    with marked("update_actor"):
        ones = torch.ones(256, 256, device="cuda")
        (ones @ ones).sum().item()
    recorder.stop()


def test_a_trace_has_kernels_and_marks(tmp_path: Path) -> None:
    record("torch", tmp_path)
    trace = (tmp_path / "step_1/actor_rank_0.json.gz").read_bytes()
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    assert "update_actor" in {event["name"] for event in events}
    assert "kernel" in {event.get("cat") for event in events}


def test_a_snapshot_of_memory_has_its_history(tmp_path: Path) -> None:
    record("torch_memory", tmp_path)
    snapshot = pickle.loads((tmp_path / "step_1/actor_rank_0.pickle").read_bytes())
    assert any(event["action"] == "alloc" for event in snapshot["device_traces"][0])


def test_a_capture_range_needs_no_nsys_around_it(tmp_path: Path) -> None:
    record("nsys", tmp_path)
    assert list((tmp_path / "step_1").iterdir()) == []  # nsys would write the file
