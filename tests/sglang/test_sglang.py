"""SGLang as a sampler, in a Python of its own."""

from __future__ import annotations

import pytest

from caldera.config import RolloutConfig
from caldera.errors import UnsupportedError
from caldera.rollout import Request, SamplingParams
from caldera.rollout.engines.rollout import EngineRollout
from tests.engine_trials import EngineTrials

pytestmark = pytest.mark.slow


class TestSGLang(EngineTrials):
    name = "sglang"

    def test_it_refuses_log_probs_that_mean_something_else(self, rollout: EngineRollout) -> None:
        assert rollout.config.logprobs_mode == RolloutConfig().logprobs_mode
        for params, name in (
            (SamplingParams(4, top_p=0.5), "top_p=0.5"),
            (SamplingParams(4, top_k=3), "top_k=3"),
            (SamplingParams(4, repetition_penalty=1.2), "repetition_penalty=1.2"),
        ):
            with pytest.raises(UnsupportedError, match=name):
                rollout.generate([Request([5, 6], params, 0)])
