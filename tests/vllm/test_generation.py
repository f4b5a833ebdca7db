"""`caldera generate` with vLLM, and against vLLM's own server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from tests.generation_trials import GenerationTrials

pytestmark = pytest.mark.slow


class TestGeneration(GenerationTrials):
    name = "vllm"
    server_arguments = (
        "-m", "vllm.entrypoints.openai.api_server", "--model={model}", "--port={port}",
        "--host=127.0.0.1", "--dtype=float32", "--max-model-len=256", "--max-num-seqs=16",
        "--enforce-eager", "--block-size=32",
    )  # fmt: skip
    server_environment: ClassVar[Mapping[str, str]] = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
