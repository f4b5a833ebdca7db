"""The keys of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import mapping, nested, option, refused

ONE_DEVICE = "sampling runs on one device in this release"
NO_AGENTS = "agent loops are not part of this release"


@dataclass
class ValKwargs:
    top_k: int = option(-1, minimum=-1)
    """Most likely tokens that may be drawn; -1: all."""
    top_p: float = option(1.0, minimum=0, maximum=1)
    """Probability mass that may be drawn."""
    temperature: float = option(0.0, minimum=0)
    """Divisor of the logits; 0: greedy."""
    n: int = option(1, minimum=1)
    """Answers per validation prompt."""
    do_sample: bool = False
    """Sample; false: greedy."""


@dataclass
class MultiTurnConfig:
    enable: bool = refused(False, NO_AGENTS)
    max_assistant_turns: int | None = refused(None, NO_AGENTS)
    max_user_turns: int | None = refused(None, NO_AGENTS)
    tool_config_path: str | None = refused(None, NO_AGENTS)
    interaction_config_path: str | None = refused(None, NO_AGENTS)
    format: str = refused("hermes", NO_AGENTS)


@dataclass
class RolloutConfig:
    name: str | None = None
    """Sampler; null: native."""
    mode: str = option("async", choices=("sync", "async"))
    """How the trainer waits. A sample depends on its seed alone, so both give the same ones."""
    temperature: float = option(1.0, minimum=0)
    """Divisor of the logits in sampling and in training log-probs."""
    top_k: int = option(-1, minimum=-1)
    """Most likely tokens that may be drawn; -1: all."""
    top_p: float = option(1.0, minimum=0, maximum=1)
    """Probability mass that may be drawn."""
    do_sample: bool = True
    """Sample; false: greedy."""
    n: int = option(1, minimum=1)
    """Answers per prompt."""
    seed: int = 42
    """Root of every sample's seed, with step, prompt and repetition."""
    prompt_length: int = II("data.max_prompt_length")
    """Width of the padded prompts, in tokens."""
    response_length: int = II("data.max_response_length")
    """Most tokens of an answer."""
    dtype: str | None = option(None, choices=("float32", "bfloat16"))
    """Precision of sampling; null: that of the parameters on a CPU, bfloat16 on CUDA."""
    gpu_memory_utilization: float = option(0.5, minimum=0, maximum=1)
    """Share of the GPU's memory that weights and cache may fill while sampling."""
    ignore_eos: bool = False
    """Go on to the full length whatever is sampled."""
    enforce_eager: bool = False
    """Forbid captured graphs. The samplers of this release use none either way."""
    free_cache_engine: bool = True
    """Return the cache's memory while training."""
    load_format: str = refused("dummy", "samplers use the trainer's weights; leave the key out")
    tensor_model_parallel_size: int = refused(1, ONE_DEVICE)
    data_parallel_size: int = refused(1, ONE_DEVICE)
    pipeline_model_parallel_size: int = refused(1, ONE_DEVICE)
    enable_chunked_prefill: bool = refused(False, "the native sampler never splits a prompt")
    max_num_batched_tokens: int = option(8192, minimum=1)
    """Prompt tokens that one forward pass of the sampler takes."""
    max_model_len: int | None = option(None, minimum=1)
    """Most tokens of prompt and answer together; null: prompt_length + response_length."""
    max_num_seqs: int = option(256, minimum=1)
    """Sequences that are decoded at the same time."""
    kv_cache_blocks: int | None = option(None, minimum=1)
    """Pages of 16 tokens in the key/value cache; null: sized to memory and requests."""
    logprobs_mode: str = option(
        "processed_logprobs", choices=("processed_logprobs", "raw_logprobs")
    )
    """Log-probs of samples after temperature and filters, or before."""
    calculate_log_probs: bool = True
    """Keep the log-prob of each sampled token in the batch."""
    log_prob_micro_batch_size: int | None = refused(None, "use log_prob_micro_batch_size_per_gpu")
    log_prob_micro_batch_size_per_gpu: int | None = option(None, minimum=1)
    """Samples per forward pass when log-probs are recomputed."""
    log_prob_use_dynamic_bsz: bool = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form these micro-batches by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: int = II("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens per micro-batch then."""
    engine_kwargs: dict[str, Any] = mapping()
    """Arguments of other samplers, by sampler; the native one has none."""
    val_kwargs: ValKwargs = nested(ValKwargs)
    multi_turn: MultiTurnConfig = nested(MultiTurnConfig)
