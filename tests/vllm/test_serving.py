"""`caldera serve` on vLLM."""

from __future__ import annotations

import pytest

from tests.serving_trials import ServingTrials

pytestmark = pytest.mark.slow


class TestServing(ServingTrials):
    name = "vllm"
