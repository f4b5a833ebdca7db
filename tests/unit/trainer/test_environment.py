from __future__ import annotations

import logging
from typing import Any

import pytest

from caldera.config import PPOTrainerConfig
from caldera.config.offline import GenerationConfig
from caldera.config.serve import ServeConfig
from caldera.errors import RolloutError
from caldera.trainer.entry import STOPPED, USER_ERROR, Asked, ConfigCommand, run_entry_point


def test_variables_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worked: list[bool] = []
    monkeypatch.setenv("VERL_SEED", "")
    monkeypatch.setenv("VERL_PROFILE_STEPS", "0")
    assert run_entry_point(lambda: worked.append(True)) == 0
    monkeypatch.setenv("VERL_SEED", "3")
    assert run_entry_point(lambda: worked.append(True)) == USER_ERROR
    assert worked == [True]
    assert "VERL_SEED='3' is not supported: actor_rollout_ref.rollout.seed" in (
        capsys.readouterr().err
    )


def test_ctrl_c_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*notes: str) -> None:
        stop = KeyboardInterrupt()
        for note in notes:
            stop.add_note(note)
        raise stop

    assert run_entry_point(work) == STOPPED == 130
    assert capsys.readouterr().err == "caldera: stopped by Ctrl-C.\n"
    assert run_entry_point(lambda: work("stopped by Ctrl-C at step 3.")) == STOPPED
    assert capsys.readouterr().err == "caldera: stopped by Ctrl-C at step 3.\n"
    monkeypatch.setenv("CALDERA_TRACEBACK", "1")
    assert run_entry_point(work) == STOPPED
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


@pytest.mark.parametrize(("schema", "key"), [
    (PPOTrainerConfig, "actor_rollout_ref.rollout.name"), (ServeConfig, "rollout.name"),
    (GenerationConfig, "rollout.name"),
])  # fmt: skip
def test_keys_of_samplers_are_called_as_the_command_has_them(
    schema: type,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(_: Any) -> None:
        raise RolloutError("actor_rollout_ref.rollout.name=x: no")

    command: ConfigCommand[Any] = ConfigCommand("caldera", "", "any", schema, work)
    asked = Asked([], "any", None, help=None, cfg=None)
    monkeypatch.setattr(ConfigCommand, "load", lambda *_: None)
    assert command.run(asked) == USER_ERROR
    assert capsys.readouterr().err == f"caldera: error: {key}=x: no\n"


@pytest.mark.parametrize("variable", ["VERL_LOGGING_LEVEL", "VERL_SFT_LOGGING_LEVEL"])
@pytest.mark.parametrize("value", ["20", "INFOO"])
def test_levels_that_are_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert run_entry_point(lambda: None) == USER_ERROR
    told = capsys.readouterr().err
    assert f"{variable}={value!r}: takes one of CRITICAL, ERROR, WARNING, INFO, DEBUG" in told


def test_the_log_of_supervised_training_has_a_level_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervised = logging.getLogger("caldera.trainer.sft")
    level = supervised.level
    monkeypatch.setenv("VERL_SFT_LOGGING_LEVEL", "error")
    try:
        assert run_entry_point(lambda: None) == 0
        assert supervised.level == logging.ERROR
    finally:
        supervised.setLevel(level)
