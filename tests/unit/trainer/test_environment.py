from __future__ import annotations

import logging

import pytest

from caldera.trainer.entry import USER_ERROR, run_entry_point


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
