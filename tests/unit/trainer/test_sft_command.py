"""The command of supervised training where torchrun has started several of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from caldera.commands.eval import EVALUATE
from caldera.trainer import sft
from caldera.trainer.fsdp_sft_trainer import CLASSIC
from caldera.trainer.main_ppo import main as train

REQUIRED = ["data.train_files=train.parquet", "model.partial_pretrain=M"]


@pytest.fixture(autouse=True)
def unchanged_interrupts() -> Iterator[None]:
    """Other ranks than 0 leave Ctrl-C to it; here they are this process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["0", "1"])
def rank(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of this process, which is said to be one of torchrun's."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("RANK", request.param)
    monkeypatch.setattr(sft, "serve_torchrun", lambda: pytest.fail("nobody would give it any work"))
    return str(request.param)


@pytest.mark.parametrize("options", [["--help"], ["-h", "optim"], ["--cfg", "job", *REQUIRED]])
def test_rank_0_alone_tells(rank: str, capsys: Any, options: list[str]) -> None:
    assert CLASSIC.main(options) == 0
    assert ("lr" in capsys.readouterr().out) is (rank == "0")


def test_other_ranks_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sft, "serve_torchrun", lambda: served.append(True))
    assert CLASSIC.main(REQUIRED) == 0
    assert served == [True]


@pytest.mark.parametrize("size", ["1", "2"])
def test_other_commands_refuse_several_processes(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    status = train(["data.train_files=absent.parquet"])
    told = capsys.readouterr().err
    if size == "2" and rank == "1":
        assert (status, told) == (0, "")
        return
    assert status == 2
    assert told.startswith("caldera: error: ")
    assert ("without torchrun; trainer.n_gpus_per_node=N" in told) is (size == "2")


def test_scoring_has_no_processes_to_start(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert EVALUATE.main(["data.path=absent.parquet"]) == 2
    assert capsys.readouterr().err.endswith("call it without torchrun\n")
