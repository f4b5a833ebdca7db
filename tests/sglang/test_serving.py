"""`caldera serve` on SGLang."""

from __future__ import annotations

import pytest

from tests.serving_trials import ServingTrials

pytestmark = pytest.mark.slow


class TestServing(ServingTrials):
    name = "sglang"
