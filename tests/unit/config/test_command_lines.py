"""Command lines that users of verl have: they are read as written, and run or are refused."""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass
from typing import Any

import pytest

from caldera.config import PPOTrainerConfig, compose_config, load_config, needs_critic
from caldera.config.fields import check_values
from caldera.config.offline import EvaluationConfig, GenerationConfig
from caldera.errors import UnsupportedError


@dataclass(frozen=True)
class Line:
    """Arguments as a shell has them, and what comes of them."""

    text: str
    refusal: str | None = None
    schema: type = PPOTrainerConfig
    config_name: str = "ppo_trainer"
    has_critic: bool = True

    @property
    def overrides(self) -> list[str]:
        return shlex.split(self.text)


PPO = """
data.train_files=/d/train.parquet data.val_files=/d/test.parquet
data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=256
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct
critic.ppo_micro_batch_size_per_gpu=4
algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console trainer.val_before_train=False
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10
trainer.total_epochs=3
"""
GRPO = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.train_files="['/d/train.parquet']" data.val_files="['/d/val.parquet']"
data.train_batch_size=64 data.max_prompt_length=2048 data.max_response_length=2048
actor_rollout_ref.model.path=/m actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.strategy=fsdp
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.top_p=0.9 trainer.nnodes=1 trainer.n_gpus_per_node=8
trainer.total_epochs=1 trainer.save_freq=100 trainer.test_freq=50
trainer.logger="['console','wandb']"
"""
START = """
data.train_files=/d/train.parquet data.val_files=/d/test.parquet data.train_batch_size=512
actor_rollout_ref.model.path=/m actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480
"""
TOOLS = """
algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
data.custom_cls.path=mine.py data.custom_cls.name=Mine data.max_response_length=16384
actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.val_kwargs.n=30
actor_rollout_ref.rollout.multi_turn.enable=True
actor_rollout_ref.rollout.multi_turn.max_user_turns=16
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16
actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml
"""
SEARCH = """
do_search=true max_turns=10 retriever.url=http://127.0.0.1:8000/retrieve retriever.topk=3
actor_rollout_ref.actor.state_masking=true
algorithm.state_masking.start_state_marker="<information>"
algorithm.state_masking.end_state_marker="</information>"
"""
MEGATRON = """
trainer.n_gpus_per_node=8 data.train_batch_size=64
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.context_parallel_size=2
actor_rollout_ref.actor.megatron.param_offload=True
actor_rollout_ref.actor.megatron.grad_offload=True
actor_rollout_ref.actor.megatron.optimizer_offload=True
actor_rollout_ref.actor.megatron.use_mbridge=True
actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
actor_rollout_ref.actor.optim.lr_decay_style=cosine actor_rollout_ref.actor.optim.min_lr=1e-7
actor_rollout_ref.actor.optim.lr_warmup_init=1e-8 actor_rollout_ref.actor.optim.clip_grad=0.5
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
critic.megatron.tensor_model_parallel_size=2 critic.megatron.pipeline_model_parallel_size=2
critic.megatron.virtual_pipeline_model_parallel_size=2 critic.megatron.context_parallel_size=2
"""
GENERATION = """
model.path=/m data.path=/d/test.parquet data.prompt_key=prompt data.n_samples=5
data.output_path=out.parquet data.batch_size=128 rollout.temperature=1.0 rollout.top_k=50
rollout.top_p=0.7
"""
EVALUATION = """
data.path=out.parquet data.prompt_key=prompt data.response_key=responses
data.data_source_key=data_source data.reward_model_key=reward_model
"""

LINES = {
    "PPO with critic": Line(PPO),
    "GRPO, asynchronous vLLM, offload": Line(GRPO, has_critic=False),
    "tools and DAPO": Line(START + TOOLS, has_critic=False),
    "search agent": Line(START + SEARCH),
    "Megatron": Line(
        PPO.replace("trainer.n_gpus_per_node=1", "").replace("data.train_batch_size=16", "")
        + MEGATRON,
        config_name="ppo_megatron_trainer",
    ),
    "generation": Line(GENERATION, schema=GenerationConfig, config_name="generation"),
    "evaluation": Line(EVALUATION, schema=EvaluationConfig, config_name="evaluation"),
}


def said(text: str) -> Any:
    """The value that a person means by this text."""
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        pass
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_every_key_has_the_value_that_the_line_says(line: Line) -> None:
    config: Any = compose_config(line.overrides, line.config_name, None, line.schema)
    assert type(config) is line.schema
    for override in line.overrides:
        key, _, text = override.partition("=")
        value = value_at(config, key)
        assert value == said(text), override
        assert isinstance(value, bool) is isinstance(said(text), bool), override


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_runs_or_is_refused_with_one_reason(line: Line) -> None:
    if line.refusal is not None:
        with pytest.raises(UnsupportedError) as raised:
            load_config(line.overrides, line.config_name)
        assert str(raised.value) == line.refusal
    elif line.schema is PPOTrainerConfig:
        assert needs_critic(load_config(line.overrides, line.config_name)) is line.has_critic
    else:
        check_values(compose_config(line.overrides, line.config_name, None, line.schema))


def test_what_follows_from_the_ppo_line() -> None:
    config = load_config(shlex.split(PPO))
    assert config.data.train_files == ["/d/train.parquet"]
    assert config.trainer.logger == ["console"]
    parts = config.actor_rollout_ref
    assert (parts.rollout.prompt_length, parts.rollout.response_length) == (512, 256)
    assert config.critic.ppo_mini_batch_size == 4
    assert config.critic.forward_micro_batch_size_per_gpu == 4


def test_the_grpo_line_runs_on_what_there_is() -> None:
    """One device and the native sampler, and the rest of the line as it stands."""
    line = [
        *shlex.split(GRPO),
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.name=native",
    ]
    config = load_config(line)
    assert not needs_critic(config)
    assert config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz is True
    assert config.actor_rollout_ref.actor.fsdp_config.optimizer_offload is True
    assert config.data.val_files == ["/d/val.parquet"]
    assert config.trainer.logger == ["console", "wandb"]


ACCEPTED = """
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.clip_ratio_low=0.2
actor_rollout_ref.actor.clip_ratio_high=0.28 data.custom_cls.path=mine.py data.custom_cls.name=Mine
data.max_response_length=16384 actor_rollout_ref.rollout.val_kwargs.n=30
actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.multi_turn.enable=True
actor_rollout_ref.rollout.multi_turn.max_user_turns=16
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16
actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml
actor_rollout_ref.rollout.top_k=50 actor_rollout_ref.rollout.dtype=bfloat16
actor_rollout_ref.rollout.ignore_eos=True actor_rollout_ref.rollout.enforce_eager=False
actor_rollout_ref.rollout.free_cache_engine=False actor_rollout_ref.rollout.load_format=dummy
actor_rollout_ref.rollout.max_num_batched_tokens=4096 actor_rollout_ref.rollout.max_num_seqs=64
actor_rollout_ref.rollout.do_sample=True actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.enable_chunked_prefill=False
max_turns=10 retriever.url=http://127.0.0.1:8000/retrieve retriever.topk=5
algorithm.state_masking.start_state_marker="<info>"
algorithm.state_masking.end_state_marker="</info>"
algorithm.kl_ctrl.target_kl=0.1 algorithm.kl_ctrl.horizon=10000 trainer.critic_warmup=1
trainer.default_local_dir=/c trainer.resume_mode=disable trainer.log_val_generations=2
trainer.default_hdfs_dir=hdfs://c trainer.del_local_ckpt_after_load=True
trainer.rollout_data_dir=/r trainer.validation_data_dir=/v custom_reward_function.path=score.py
custom_reward_function.name=score data.prompt_key=question actor_rollout_ref.model.lora_rank=8
"""


def test_keys_that_are_honoured() -> None:
    config = load_config([*shlex.split(PPO), *shlex.split(ACCEPTED)])
    for override in shlex.split(ACCEPTED):
        key, _, text = override.partition("=")
        assert value_at(config, key) == said(text), override


REFUSED = """
actor_rollout_ref.rollout.name=trtllm
actor_rollout_ref.model.use_fused_kernels=True
trainer.esi_redundant_time=60
"""


@pytest.mark.parametrize("override", shlex.split(REFUSED))
def test_keys_that_are_known_and_refused(override: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        load_config([*shlex.split(PPO), override])
    assert str(raised.value).startswith(f"{override.partition('=')[0]}=")
