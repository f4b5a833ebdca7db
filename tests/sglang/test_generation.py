"""`caldera generate` with SGLang, and against SGLang's own server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from tests.generation_trials import GenerationTrials

pytestmark = pytest.mark.slow


class TestGeneration(GenerationTrials):
    name = "sglang"
    server_arguments = (
        "-m", "sglang.launch_server", "--model-path={model}", "--port={port}", "--host=127.0.0.1",
        "--dtype=float32", "--context-length=256", "--max-running-requests=16", "--device=cpu",
        "--attention-backend=torch_native", "--sampling-backend=pytorch", "--grammar-backend=none",
        "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup",
        "--mem-fraction-static=0.8", "--max-total-tokens=8192",
    )  # fmt: skip
    server_environment: ClassVar[Mapping[str, str]] = {"SGLANG_USE_CPU_ENGINE": "1"}
    # The same code as vLLM's, which tests it; here it would start the engine three times.
    test_a_killed_run_goes_on = None
