from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from caldera.errors import ConfigError, DataError, RegistryError, UnsupportedError
from caldera.tracking import (
    LOGGERS,
    Generation,
    LoggedRun,
    Tracking,
    background,
    check_loggers,
)


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


STEP = {"timing_s/gen": 2.0, "actor/lr": 1e-6, "critic/score/mean": 0.5, "critic/score/max": 1.0}
SHORT_LINE = "step:1 - critic/score/mean:0.5 - actor/lr:1e-06\n"


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (None, SHORT_LINE),
        (["short"], SHORT_LINE),
        (["critic/*"], "step:1 - critic/score/mean:0.5 - critic/score/max:1\n"),
        (["actor/nothing"], ""),
    ],
)
def test_the_console_is_short_where_a_file_keeps_the_rest(
    asked: list[str] | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracking("p", "e", ["console", "file"], None, tmp_path, console_metrics=asked) as tracking:
        tracking.log(STEP, 1)
    assert capsys.readouterr().out == line
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["data"] == STEP


@pytest.mark.parametrize(("names", "asked"), [(["console"], None), (["console", "file"], ["all"])])
def test_the_console_shows_all_where_it_is_alone_or_asked(
    names: list[str],
    asked: list[str] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Tracking("p", "e", names, None, tmp_path, console_metrics=asked) as tracking:
        tracking.log(STEP, 1)
    assert capsys.readouterr().out.count(" - ") == len(STEP)


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
    log_steps(tmp_path, range(0, 3))
    assert logged_steps(tmp_path / "metrics.jsonl") == [0, 1, 2]
    assert logged_steps(tmp_path / "metrics.1.jsonl") == [0, 1, 2, 3, 4, 5]  # nothing is lost
    assert logged_steps(tmp_path / "metrics.2.jsonl") == [0, 1]


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
        RegistryError, match=r"unknown trainer.logger 'consle'.*known: clearml, console, file"
    ):
        Tracking("p", "e", ["file", "consle"], None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_generations_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    with Tracking("p", "e", "console") as tracking:
        tracking.log_generations([("1+1", "[bold]2", 1.0)], 3)
    assert capsys.readouterr().out == "[validation, step 3, score 1] 1+1\n[bold]2\n"


def test_generations_in_the_file_are_rewound_too(tmp_path: Path) -> None:
    for resume_step, steps in ((0, (1, 2, 3)), (2, (3,))):
        with Tracking("p", "e", "file", None, tmp_path, resume_step) as tracking:
            for step in steps:
                tracking.log_generations([("q", "a", 0.5)], step)
    rows = (tmp_path / "metrics.generations.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]
    assert json.loads(rows[0]) == {"step": 1, "input": "q", "output": "a", "score": 0.5}


# ---- back ends that fail


class Recording:
    """Keeps what it is given."""

    def __init__(self, run: LoggedRun) -> None:
        self.rows: list[int] = []
        OPENED.append(self)

    def log(self, data: dict[str, float], step: int) -> None:
        self.rows.append(step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        self.rows.append(-step)

    def finish(self) -> None:
        self.rows.append(0)


class Raising(Recording):
    def log(self, data: dict[str, float], step: int) -> None:
        raise ConnectionError("server away")


class Unopened(Recording):
    def __init__(self, run: LoggedRun) -> None:
        raise RuntimeError("no account")


class Hanging(Recording):
    def log(self, data: dict[str, float], step: int) -> None:
        RELEASE.wait(30)


class Exiting(Recording):
    def log(self, data: dict[str, float], step: int) -> None:
        if step == 2:
            raise SystemExit("give up")
        super().log(data, step)


class Dying(Recording):
    def log(self, data: dict[str, float], step: int) -> None:
        raise KeyboardInterrupt


OPENED: list[Recording] = []
RELEASE = threading.Event()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recording]]:
    classes = {"recording": Recording, "raising": Raising, "unopened": Unopened}
    others = {"hanging": Hanging, "exiting": Exiting, "dying": Dying}
    known = {**LOGGERS._items, **classes, **others}
    monkeypatch.setattr(LOGGERS, "_items", known)
    OPENED.clear()
    RELEASE.clear()
    yield OPENED
    RELEASE.set()


@pytest.mark.parametrize(
    ("name", "reason", "lost"),
    [
        ("raising", "ConnectionError: server away", 2),
        ("unopened", "RuntimeError: no account", 4),  # the opening, two rows, one table
    ],
)
def test_a_logger_that_fails_is_told_once_and_counted(
    tmp_path: Path, backends: list[Recording], caplog: pytest.LogCaptureFixture,
    name: str, reason: str, lost: int,
) -> None:  # fmt: skip
    with Tracking("p", "e", [name, "recording", "file"], None, tmp_path) as tracking:
        tracking.log({"x": 1}, 1)
        tracking.log({"x": 2}, 2)
        tracking.log_generations([("q", "a", 1.0)], 2)
    assert caplog.text.count("has failed, and the run goes on") == 1
    assert reason in caplog.text and f"{name} has lost {lost} rows" in caplog.text
    assert tracking.lost_rows == lost
    assert backends[-1].rows == [1, 2, -2, 0]
    assert logged_steps(tmp_path / "metrics.jsonl") == [1, 2]


def test_lost_rows_are_a_metric_of_the_others(tmp_path: Path, backends: list[Recording]) -> None:
    with Tracking("p", "e", ["raising", "file"], None, tmp_path) as tracking:
        tracking.log({"x": 1}, 1)
        while not tracking.lost_rows:
            time.sleep(0.001)
        tracking.log({"x": 2}, 2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["data"].get("tracking/lost_rows") for row in rows] == [None, 1]


def test_a_logger_that_hangs_holds_nothing_up(
    tmp_path: Path, backends: list[Recording], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(background, "FINISH_S", 0.05)
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    with Tracking("p", "e", ["hanging", "file"], None, tmp_path) as tracking:
        for step in range(1, 11):
            tracking.log({"x": 1}, step)
    assert logged_steps(tmp_path / "metrics.jsonl") == list(range(1, 11))
    assert "rows wait already" in caplog.text
    # At most one is in the logger's hands and three wait: the rest, and those, are lost.
    assert tracking.lost_rows >= 9


def test_a_batch_counts_as_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    started, release, done = threading.Event(), threading.Event(), list[int]()

    def hold(backend: Recording) -> None:
        started.set()
        release.wait(30)

    run = LoggedRun("p", "e", None, Path("."), 0)
    losses = background.Losses("held")
    held = background.Background(losses, "held", lambda: Recording(run))
    held.give(hold)
    assert started.wait(30)
    held.give(lambda backend: done.append(5), 5)  # an empty queue takes a batch of any size
    held.give(lambda backend: done.append(1), 1)
    assert losses.count == 1
    release.set()
    held.finish()
    assert done == [5] and losses.count == 1


def test_a_library_that_ends_the_thread_ends_no_other_row(
    tmp_path: Path, backends: list[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    with Tracking("p", "e", "exiting", None, tmp_path) as tracking:
        for step in (1, 2, 3):
            tracking.log({"x": 1}, step)
    assert backends[-1].rows == [1, 3, 0] and tracking.lost_rows == 1
    assert "SystemExit: give up" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rows_of_a_thread_that_has_died_are_counted(
    tmp_path: Path, backends: list[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    with Tracking("p", "e", "dying", None, tmp_path) as tracking:
        for step in (1, 2, 3):
            tracking.log({"x": 1}, step)
    assert tracking.lost_rows == 3
    assert "its thread has died" in caplog.text and "dying has lost 3 rows" in caplog.text


def test_the_end_reaches_a_logger_whose_queue_is_full(
    tmp_path: Path, backends: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 1)
    with Tracking("p", "e", "hanging", None, tmp_path) as tracking:
        for step in (1, 2, 3, 4):
            tracking.log({"x": 1}, step)
        RELEASE.set()
    assert backends[-1].rows == [0]


def test_answers_that_are_no_text_are_written(tmp_path: Path) -> None:
    with Tracking("p", "e", "file", None, tmp_path) as tracking:
        tracking.log_generations([("q", "half of a pair: \ud83d", 0.5)], 1)
    assert tracking.lost_rows == 0
    (row,) = (tmp_path / "metrics.generations.jsonl").read_text().splitlines()
    assert json.loads(row)["output"] == "half of a pair: \ud83d"


def test_a_file_that_cannot_be_opened_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("not a folder")
    with Tracking("p", "e", ["file"], None, tmp_path / "run") as tracking:
        tracking.log({"x": 1}, 1)
    assert "trainer.logger: file has failed" in caplog.text
    assert tracking.lost_rows == 2


# ---- names


def test_a_logger_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caldera.tracking.backends.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb' needs the package wandb: .*\[tracking\]'$"):
        check_loggers(["console", "wandb"])


@pytest.mark.parametrize("name", ["vemlp_wandb", "rl_insight"])
def test_loggers_that_only_verl_has_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"trainer.logger='{name}': .* takes clearml, "):
        check_loggers([name])


@pytest.mark.parametrize("variable", ["VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"])
def test_a_second_run_with_the_same_file_is_refused_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    with Tracking("p", "e", "file", None, tmp_path / "one") as first:
        first.log({"x": 1.0}, 1)
        with pytest.raises(ConfigError, match=rf"^{variable}: .*another run is writing it"):
            Tracking("p", "e", "file", None, tmp_path / "two")
        first.log({"x": 2.0}, 2)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert logged_steps(file) == [1, 2]
    with Tracking("p", "e", "file", None, tmp_path / "one", 2) as resumed:
        resumed.log({"x": 3.0}, 3)
    assert logged_steps(file) == [1, 2, 3]
