from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from caldera.errors import DataError, RegistryError
from caldera.tracking import LOGGERS, LoggedRun, Tracking


@pytest.fixture(autouse=True)
def no_logger_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT", raising=False)


def log_steps(run_dir: Path, steps: range, resume_step: int = 0) -> None:
    with Tracking("p", "e", "file", None, run_dir, resume_step) as tracking:
        for step in steps:
            tracking.log({"actor/entropy": step / 2}, step)


def logged_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_console_prints_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with Tracking("p", "e", "console") as tracking:
        tracking.log(
            {"critic/score/mean": 0.123456789, "tokens": 1234567, "rate": 123456.7, "lr": 1e-6}, 3
        )
    expected = "step:3 - critic/score/mean:0.12346 - tokens:1234567 - rate:123457 - lr:1e-06\n"
    assert capsys.readouterr().out == expected


def test_console_neither_wraps_nor_interprets_a_long_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [f"val-core/[bold]{k}/acc/mean@1" for k in range(40)]
    with Tracking("p", "e", ["console"]) as tracking:
        tracking.log(dict.fromkeys(names, 0.5), 1)
    assert capsys.readouterr().out == "step:1 - " + " - ".join(f"{n}:0.5" for n in names) + "\n"


def test_file_rows_and_plain_numbers(tmp_path: Path) -> None:
    tracking = Tracking("p", "e", ["file", "file"], {"a": 1}, tmp_path / "new")
    tracking.log({"x": np.float32(0.5), "n": np.int64(7)}, 1)
    # Read before finish: every row is on disk as soon as it is logged.
    text = (tmp_path / "new" / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "data": {"x": 0.5, "n": 7}}\n'
    tracking.finish()
    tracking.finish()


@pytest.mark.parametrize(
    ("variable", "value", "file"),
    [
        ("VERL_FILE_LOGGER_PATH", "chosen/rows.jsonl", "chosen/rows.jsonl"),
        ("VERL_FILE_LOGGER_ROOT", "root", "root/p/e.jsonl"),
    ],
)
def test_file_path_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, file: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / value))
    log_steps(tmp_path / "unused", range(1, 3))
    assert logged_steps(tmp_path / file) == [1, 2]
    assert not (tmp_path / "unused").exists()


def test_resume_drops_later_rows_and_appends(tmp_path: Path) -> None:
    log_steps(tmp_path, range(0, 6))
    log_steps(tmp_path, range(4, 7), resume_step=3)
    assert logged_steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_begins_a_new_file(tmp_path: Path) -> None:
    log_steps(tmp_path, range(0, 6))
    log_steps(tmp_path, range(0, 2))
    assert logged_steps(tmp_path / "metrics.jsonl") == [0, 1]


@pytest.mark.parametrize("torn", ['{"step": 3, "da', '{"step": 3, "data": {"x": "é"'])
def test_resume_drops_a_torn_last_line(tmp_path: Path, torn: str) -> None:
    log_steps(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    # Cut inside the last character too, as a killed process may.
    path.write_bytes(path.read_bytes() + torn.encode()[:-1])
    log_steps(tmp_path, range(3, 5), resume_step=10)
    assert logged_steps(path) == [1, 2, 3, 4]


def test_resume_keeps_a_whole_last_row_without_its_newline(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    log_steps(tmp_path, range(3, 4), resume_step=2)
    assert logged_steps(path) == [1, 2, 3]


@pytest.mark.parametrize("broken", ["not json", '["a list"]', '{"no": "step"}'])
def test_resume_refuses_a_file_that_is_no_metrics_file(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "data": {{}}}}\n{broken}\n{{"step": 2, "data": {{}}}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 2"):
        log_steps(tmp_path, range(3, 4), resume_step=2)
    assert broken in path.read_text()


def test_unknown_logger_lists_the_known_ones_and_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        RegistryError, match=r"unknown trainer.logger 'consle'.*known: console, file"
    ):
        Tracking("p", "e", ["file", "consle"], None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_logger_is_finished_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[str] = []

    class Recording:
        def __init__(self, run: LoggedRun) -> None:
            assert run.resume_step == 2

        def log(self, data: dict[str, float], step: int) -> None: ...

        def finish(self) -> None:
            finished.append("recording")

    class Failing(Recording):
        def finish(self) -> None:
            raise OSError("disk full")

    monkeypatch.setattr(LOGGERS, "_items", {"recording": Recording, "failing": Failing})
    tracking = Tracking("p", "e", ["recording", "failing"], None, tmp_path, resume_step=2)
    with pytest.raises(OSError, match="disk full"):
        tracking.finish()
    assert finished == ["recording"]
