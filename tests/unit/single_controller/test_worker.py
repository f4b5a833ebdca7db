"""What a worker knows of its place."""

from __future__ import annotations

import pytest

from caldera.errors import ProtocolError
from caldera.single_controller import Worker

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def place_of(worker: Worker) -> tuple[int, ...]:
    return worker.rank, worker.world_size, worker.local_rank, worker.local_world_size


def test_a_place_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert place_of(Worker()) == (0, 1, 0, 1)
    assert Worker().get_master_addr_port() == ("127.0.0.1", "0")
    for name, value in zip(VARIABLES, ["5", "8", "1", "4", "10.0.0.1", "4711"], strict=True):
        monkeypatch.setenv(name, value)
    assert place_of(Worker()) == (5, 8, 1, 4)
    assert Worker().get_master_addr_port() == ("10.0.0.1", "4711")


def test_a_place_by_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    worker = Worker()
    worker.place(1, 2)
    assert place_of(worker) == (1, 2, 1, 2)


def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Worker().get_cuda_visible_devices() == "not set"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert Worker().get_cuda_visible_devices() == "2,3"


def test_only_rank_zero_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        worker = Worker()
        worker.place(rank, 2)
        worker.print_rank0("rank", rank)
    assert capsys.readouterr().out == "rank 0\n"


def test_a_mesh_is_registered_once_and_for_one_worker() -> None:
    worker, other = Worker(), Worker()
    worker._register_dispatch_collect_info("actor", dp_rank=3, is_collect=True)
    assert worker._query_dispatch_info("actor") == 3
    assert worker._query_collect_info("actor") is True
    with pytest.raises(ProtocolError, match="mesh 'actor' is registered already"):
        worker._register_dispatch_collect_info("actor", 0, False)
    with pytest.raises(ProtocolError, match=r"mesh 'actor' \(known: none\)$"):
        other._query_dispatch_info("actor")


def test_a_worker_alone_knows_no_others() -> None:
    assert Worker().get_fused_worker_by_name("critic") is None
