"""The command of supervised training where torchrun has started several of it."""

from __future__ import annotations

from typing import Any

import pytest

from caldera.trainer.fsdp_sft_trainer import CLASSIC
from caldera.trainer.sft import command

REQUIRED = ["data.train_files=train.parquet", "model.partial_pretrain=M"]


@pytest.fixture(params=["0", "1"])
def rank(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of this process, which is said to be one of torchrun's."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("RANK", request.param)
    monkeypatch.setattr(command, "_serve", lambda: pytest.fail("nobody would give it any work"))
    return str(request.param)


@pytest.mark.parametrize("options", [["--help"], ["-h", "optim"], ["--cfg", "job", *REQUIRED]])
def test_rank_0_alone_tells(rank: str, capsys: Any, options: list[str]) -> None:
    assert CLASSIC.main(options) == 0
    assert ("lr" in capsys.readouterr().out) is (rank == "0")


def test_other_ranks_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(command, "_serve", lambda: served.append(True))
    assert CLASSIC.main(REQUIRED) == 0
    assert served == [True]
