from __future__ import annotations

import io
import re
import sys
from itertools import count

import pytest

from caldera.tracking import Tracking, TrainingProgress, progress_iter
from caldera.tracking.progress import CONSOLE, _clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def ten_seconds_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances ten seconds whenever it is read."""
    ticks = count(0, 10)
    monkeypatch.setattr("caldera.tracking.progress.time.monotonic", lambda: float(next(ticks)))


@pytest.mark.usefixtures("ten_seconds_a_look")
def test_plain_lines_have_step_eta_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(100, 40, "Training", seconds_between_lines=0) as bar:
        bar.update(41, reward=0.25, tokens_per_second=12345.678)
    line = capsys.readouterr().out
    pattern = (
        r"Training: step 41/100 \| elapsed 0:0\d:\d\d \| ETA (\d+):(\d\d):(\d\d) "
        r"\| reward 0\.25 \| tokens/s 12346\n"
    )
    match = re.fullmatch(pattern, line)
    assert match is not None, line
    # One step took 10 s: 59 more take 590 s, less the clock's looks since.
    hours, minutes, seconds = map(int, match.groups())
    assert 550 <= hours * 3600 + minutes * 60 + seconds <= 590


def test_plain_output_has_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("caldera.tracking.progress.time.monotonic", lambda: 0.0)  # no time passes
    with TrainingProgress(3, 0, "Training [bold]", seconds_between_lines=0) as bar:
        for step in (1, 2, 3):
            bar.update(step, reward=step / 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        f"Training [bold]: step {k}/3" for k in (1, 2, 3)
    ]
    assert all(" | ETA 0:00:00 | " in line and line.isprintable() for line in lines)


def test_between_two_lines_only_the_last_state_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TrainingProgress(1000, seconds_between_lines=3600) as bar:
        for step in range(1, 501):
            bar.update(step)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Training: step 500/1000 | elapsed 0:00:0")


def test_nothing_done_prints_nothing_and_knows_no_eta(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(10, 4) as bar:
        assert bar.clocks()[1] == "ETA unknown"
        bar.update(4)
        assert bar.clocks()[1] == "ETA unknown"
    assert "step 4/10" in capsys.readouterr().out
    with TrainingProgress(10, 4):
        pass
    assert capsys.readouterr().out == ""


def test_progress_iter_passes_everything_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress_iter(iter("abc"), 3, "Filtering")) == ["a", "b", "c"]
    assert capsys.readouterr().out.startswith("Filtering: item 3/3 | elapsed 0:00:0")


def test_a_terminal_gets_a_bar_and_log_lines_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with Tracking("p", "e", "console") as tracking, TrainingProgress(4, 1) as bar:
        tracking.log({"critic/score/mean": 0.5}, 2)
        bar.update(2, reward=0.5)
        # A bar within the bar falls back to lines above it.
        assert list(progress_iter([7], 1, "Filtering")) == [7]
        bar.update(4, reward=0.75)
    text = terminal.getvalue()
    assert "\x1b[" in text and "━" in text
    assert "step:2 - critic/score/mean:0.5\n" in text
    assert "Filtering: item 1/1 | " in text
    shown = text.rsplit("\x1b[2K", 1)[-1]
    assert "Training: step 4/4" in shown and "reward 0.75" in shown
    with TrainingProgress(1) as again:  # the first bar gave the screen back
        again.update(1)
    assert "━" in terminal.getvalue()[len(text) :]


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_a_narrow_terminal_shows_step_and_eta(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(CONSOLE, "_width", width)  # which COLUMNS would set when it is made
    monkeypatch.setattr("caldera.tracking.progress.time.monotonic", lambda: 0.0)
    with TrainingProgress(2000, 0, "Supervised start, until 40% are right") as bar:
        bar.update(1337, loss=0.25)
    shown = terminal.getvalue().rsplit("\x1b[2K", 1)[-1]
    line = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown).splitlines()[0]
    assert len(line.rstrip()) <= width
    assert line.startswith("Supervised start") and "step 1337/2000" in line
    assert "ETA 0:00:00" in line
    assert ("until 40% are right: " in line) is (width >= 80)
    assert ("elapsed 0:00:00" in line) is (width == 120)
    assert ("━" in line) is (width == 120)


def test_clock() -> None:
    assert [_clock(s) for s in (-3.0, 59.6, 3661.0, 360000.0)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "100:00:00",
    ]
