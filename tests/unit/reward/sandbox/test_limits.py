from __future__ import annotations

import pytest

from caldera.errors import ConfigError
from caldera.sandbox import Limits, Outcome


def test_limits_are_positive_whole_numbers() -> None:
    with pytest.raises(ConfigError, match=r"Limits\.processes=0 must be greater than 0"):
        Limits(processes=0)
    with pytest.raises(ConfigError, match=r"Limits\.cpu_seconds=0\.5 must be an integer"):
        Limits(cpu_seconds=0.5)  # type: ignore[arg-type]
    assert Limits(wall_seconds=0.5).wall_seconds == 0.5


def test_only_ok_is_ok() -> None:
    assert Outcome("ok").ok
    assert not any(
        Outcome(status).ok for status in ("failed", "timed out", "out of memory", "output limit")
    )
