"""`caldera serve` on SGLang."""

from __future__ import annotations

import pytest

from tests.serving_trials import ServingTrials

pytestmark = pytest.mark.slow


class TestServing(ServingTrials):
    name = "sglang"
    # vLLM's tests have it, and test_sglang.py an engine that is killed without a server before it.
    test_a_killed_engine_loses_no_stream = None
