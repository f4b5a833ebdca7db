"""Command lines that users of verl have: they run as they are, or are refused with a reason."""

from __future__ import annotations

import shlex

import pytest

from caldera.config import load_config, needs_critic
from caldera.errors import UnsupportedError

PPO = """
data.train_files=/d/train.parquet data.val_files=/d/test.parquet data.train_batch_size=16
data.max_prompt_length=512 data.max_response_length=256
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct
critic.ppo_micro_batch_size_per_gpu=4 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console
trainer.val_before_train=False trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10
trainer.test_freq=10 trainer.total_epochs=3
"""

GRPO = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.train_files="['/d/train.parquet']" data.val_files="['/d/val.parquet']"
data.train_batch_size=64 data.max_prompt_length=2048 data.max_response_length=2048
actor_rollout_ref.model.path=M actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.strategy=fsdp
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.top_p=0.9 trainer.nnodes=1 trainer.total_epochs=1
trainer.save_freq=100 trainer.test_freq=50 trainer.logger="['console','wandb']"
"""

ACCEPTED = """
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.clip_ratio_low=0.2
actor_rollout_ref.actor.clip_ratio_high=0.28 data.custom_cls.path=mine.py data.custom_cls.name=Mine
data.max_response_length=16384 actor_rollout_ref.rollout.val_kwargs.n=30
actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.top_k=50 actor_rollout_ref.rollout.dtype=bfloat16
actor_rollout_ref.rollout.ignore_eos=True actor_rollout_ref.rollout.enforce_eager=False
actor_rollout_ref.rollout.free_cache_engine=False actor_rollout_ref.rollout.load_format=dummy
actor_rollout_ref.rollout.max_num_batched_tokens=4096 actor_rollout_ref.rollout.max_num_seqs=64
actor_rollout_ref.rollout.do_sample=True actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.enable_chunked_prefill=False
algorithm.kl_ctrl.target_kl=0.1 algorithm.kl_ctrl.horizon=10000 trainer.critic_warmup=1
trainer.default_local_dir=/c trainer.resume_mode=disable trainer.log_val_generations=2
trainer.rollout_data_dir=/r trainer.validation_data_dir=/v custom_reward_function.path=score.py
custom_reward_function.name=score data.prompt_key=question actor_rollout_ref.model.lora_rank=8
"""

REFUSED = """
actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8
actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
actor_rollout_ref.rollout.multi_turn.enable=True
actor_rollout_ref.rollout.multi_turn.max_user_turns=16
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16
actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml
do_search=true max_turns=10 retriever.url=http://127.0.0.1:8000/retrieve retriever.topk=5
actor_rollout_ref.actor.state_masking=true
algorithm.state_masking.start_state_marker="<info>"
algorithm.state_masking.end_state_marker="</info>"
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.actor.fsdp_config.forward_prefetch=True
actor_rollout_ref.actor.fsdp_config.fsdp_size=4
actor_rollout_ref.actor.entropy_from_logits_with_chunking=True
trainer.default_hdfs_dir=hdfs://c reward_model.enable=True reward_model.enable_resource_pool=True
"""


def test_ppo_with_critic() -> None:
    config = load_config(shlex.split(PPO))
    assert needs_critic(config)
    assert config.data.train_files == ["/d/train.parquet"]
    assert config.data.train_batch_size == 16
    parts = config.actor_rollout_ref
    assert (parts.rollout.prompt_length, parts.rollout.response_length) == (512, 256)
    assert (parts.actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    assert (parts.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size) == (4, 4)
    assert parts.rollout.gpu_memory_utilization == 0.4
    assert config.trainer.val_before_train is False
    assert (config.trainer.save_freq, config.trainer.total_epochs) == (10, 3)


def test_grpo() -> None:
    config = load_config(shlex.split(GRPO))
    assert not needs_critic(config)
    parts = config.actor_rollout_ref
    assert (parts.rollout.n, parts.rollout.top_p) == (16, 0.9)
    assert parts.rollout.log_prob_use_dynamic_bsz is True
    assert parts.actor.fsdp_config.optimizer_offload is True
    assert config.data.val_files == ["/d/val.parquet"]
    assert config.trainer.logger == ["console", "wandb"]


def test_keys_that_are_honoured() -> None:
    load_config([*shlex.split(PPO), *shlex.split(ACCEPTED)])


@pytest.mark.parametrize("override", shlex.split(REFUSED))
def test_keys_that_are_known_and_refused(override: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        load_config([*shlex.split(PPO), override])
    assert override.partition("=")[0] in str(raised.value)


def test_state_markers_of_the_search_agent_at_their_defaults() -> None:
    markers = ['start_state_marker="<information>"', 'end_state_marker="</information>"']
    load_config([*shlex.split(PPO), *(f"algorithm.state_masking.{marker}" for marker in markers)])
