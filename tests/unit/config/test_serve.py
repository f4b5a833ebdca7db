"""Keys of serving: what reaches the sampler, and what is refused."""

from __future__ import annotations

import pytest

from caldera.commands.serve import SERVE
from caldera.config.rollout import RolloutConfig
from caldera.config.samplers import SAMPLERS
from caldera.config.serve import ServeConfig, served_sampler
from caldera.errors import CalderaError


def sampler_config(config: ServeConfig, length: int) -> RolloutConfig:
    return served_sampler(config, length, SAMPLERS[config.rollout.sampler])


def test_engines_get_their_keys() -> None:
    config = SERVE.load(
        [
            "model.path=x", "rollout.name=vllm", "rollout.engine_python=/opt/vllm/bin/python",
            "+rollout.engine_kwargs.max_logprobs=5", "rollout.tensor_model_parallel_size=2",
            "rollout.gpu_memory_utilization=0.7",
        ],
        "serve", None,
    )  # fmt: skip
    sampler = sampler_config(config, 100)
    assert sampler.name == "vllm"
    assert sampler.engine_python == "/opt/vllm/bin/python"
    assert sampler.engine_kwargs == {"vllm": {"max_logprobs": 5}}
    assert sampler.tensor_model_parallel_size == 2
    assert sampler.gpu_memory_utilization == 0.7
    assert sampler.max_model_len == 100


def test_a_server_elsewhere_gets_its_address() -> None:
    remote = ["rollout.name=remote", "rollout.remote.url=http://host:1", "rollout.remote.model=m"]
    sampler = sampler_config(SERVE.load(["model.path=x", *remote], "serve", None), 100)
    assert (sampler.name, sampler.remote.url, sampler.remote.model) == (
        "remote", "http://host:1", "m",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], "raw_logprobs"),
        (["rollout.name=sglang"], "raw_logprobs"),
        (["rollout.logprobs_mode=processed_logprobs"], "processed_logprobs"),
    ],
)
def test_log_probs_are_the_models_unless_others_are_asked_for(
    overrides: list[str], mode: str
) -> None:
    config = SERVE.load(["model.path=x", *overrides], "serve", None)
    assert sampler_config(config, 100).logprobs_mode == mode


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine_python=x"], r"^rollout.engine_python='x': takes rollout.name=vllm or"),
        (
            ["rollout.engine_python=x", "rollout.name=hf"],
            r"^rollout.engine_python='x': takes rollout.name=vllm or sglang, not hf",
        ),
        (
            ["+rollout.engine_kwargs.max_logprobs=5"],
            r"^rollout.engine_kwargs=.*takes rollout.name=vllm or sglang, not native",
        ),
        (["rollout.name=remote"], r"^rollout.remote.url=null with rollout.name=remote"),
        (["rollout.remote.url=http://host:1"], r"^rollout.remote.url='http://host:1' with"),
        (
            [
                "rollout.name=remote",
                "rollout.remote.url=http://host:1",
                "rollout.logprobs_mode=processed_logprobs",
            ],
            r"^rollout.logprobs_mode='processed_logprobs': .*vllm or sglang, not remote",
        ),
        (["rollout.remote.model=m"], r"^rollout.remote.model='m': takes rollout.name=remote"),
    ],
)
def test_keys_that_a_sampler_does_not_take(overrides: list[str], message: str) -> None:
    with pytest.raises(CalderaError, match=message):
        SERVE.load(["model.path=x", *overrides], "serve", None)
