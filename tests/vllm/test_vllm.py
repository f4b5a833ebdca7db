"""vLLM as a sampler, in a Python of its own."""

from __future__ import annotations

import pytest

from caldera.rollout import Request, SamplingParams
from caldera.rollout.engines.rollout import EngineRollout
from tests.engine_trials import EngineTrials

pytestmark = pytest.mark.slow


class TestVllm(EngineTrials):
    name = "vllm"

    def test_a_sample_depends_on_its_seed(
        self, rollout: EngineRollout, prompts: list[list[int]]
    ) -> None:
        params = SamplingParams(8, temperature=1.0, ignore_eos=True)
        first, again, other = (
            rollout.generate([Request(prompts[1], params, seed)])[0].token_ids for seed in (1, 1, 2)
        )
        assert first == again != other
