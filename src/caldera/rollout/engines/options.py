"""From Caldera's keys to the arguments of an engine."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from caldera.config.samplers import KEY, SamplerTraits
from caldera.errors import ConfigError, UnsupportedError
from caldera.rollout.base import SamplingParams
from caldera.seeds import derive_seed

if TYPE_CHECKING:
    from caldera.config import RolloutConfig
    from caldera.rollout.engines.weights import AdapterShape

CPU_BLOCK = 32
"""Tokens of a page of vLLM's cache on a CPU, whose kernels take multiples of this."""
MEMORY_ON_CPU = 0.1
"""Share of the host's memory that SGLang's cache takes on a CPU."""
KEPT_BY_SGLANG = 6
"""Tokens of its context that SGLang gives to no prompt; two of them it gives to no response."""
SEED = "random_seed"
SEEDS = 2**31
Arguments = dict[str, Any]


def engine_arguments(
    name: str,
    config: RolloutConfig,
    model: str,
    gpus: int | None,
    adapter: AdapterShape | None = None,
) -> Arguments:
    """Everything that an engine is started with; `engine_kwargs` comes last, and wins.

    `gpus`: how many it can have; None: it runs on the CPU.
    """
    tensor_parallel = config.tensor_model_parallel_size
    if gpus is not None and tensor_parallel > gpus:
        raise UnsupportedError(
            f"{KEY}.tensor_model_parallel_size={tensor_parallel}: this process sees {gpus} GPU; "
            "takes as many processes (trainer.n_gpus_per_node) as an engine has GPUs, or 1"
        )
    given = config.engine_kwargs.get(name) or {}
    chosen = {key: value for key, value in given.items() if value is not None}
    arguments = BUILDERS[name](config, model, gpus is None)
    if adapter is not None:
        # There is one at a time: with new weights another takes its place.
        arguments |= {"enable_lora": True, "max_lora_rank": adapter.rank, "max_loras": 1}
    fixed = {"model", "model_path", "dtype", "load_format", "skip_tokenizer_init"}
    if taken := sorted(fixed & chosen.keys()):
        raise ConfigError(
            f"{KEY}.engine_kwargs.{name}.{taken[0]}={chosen[taken[0]]!r}: Caldera sets it"
        )
    return {**arguments, **chosen}


def reseeded(name: str, arguments: Arguments, *path: int) -> Arguments:
    """The arguments with a seed of SGLang's own for this rank, replica or start: its random stream
    would be the same in all of them. vLLM's seeds are those of requests."""
    if name != "sglang":
        return arguments
    return {**arguments, SEED: derive_seed(arguments[SEED], *path) % SEEDS}


def _vllm(config: RolloutConfig, model: str, on_cpu: bool) -> Arguments:
    arguments: Arguments = {
        "model": model,
        "dtype": config.dtype,
        "load_format": "dummy",  # weights come from the trainer
        "skip_tokenizer_init": True,
        "seed": config.seed,
        "max_model_len": config.longest_sequence,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": _batched_tokens(config),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enforce_eager": config.enforce_eager or on_cpu,
        "logprobs_mode": config.logprobs_mode,
        "max_logprobs": -1,  # as many as a request asks for
        "disable_log_stats": config.disable_log_stats,
    }
    if on_cpu:
        # A cache on a CPU has a separate size (VLLM_CPU_KVCACHE_SPACE).
        del arguments["gpu_memory_utilization"]
        arguments["block_size"] = CPU_BLOCK
    else:
        arguments["enable_sleep_mode"] = True
        if config.cudagraph_capture_sizes is not None:
            arguments["cudagraph_capture_sizes"] = config.cudagraph_capture_sizes
    return arguments


def _sglang(config: RolloutConfig, model: str, on_cpu: bool) -> Arguments:
    arguments: Arguments = {
        "model_path": model,
        "dtype": config.dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        SEED: config.seed,
        "context_length": config.longest_sequence + KEPT_BY_SGLANG,
        "max_running_requests": config.max_num_seqs,
        "max_prefill_tokens": _batched_tokens(config),
        "chunked_prefill_size": (
            config.max_num_batched_tokens if config.enable_chunked_prefill else -1
        ),
        "disable_radix_cache": not config.enable_prefix_caching,
        "mem_fraction_static": config.gpu_memory_utilization,
        "tp_size": config.tensor_model_parallel_size,
        "disable_cuda_graph": config.enforce_eager or on_cpu,
        "enable_metrics": not config.disable_log_stats,
        "log_level": "warning",
    }
    if on_cpu:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_overlap_schedule": True,
            "skip_server_warmup": True,
            "mem_fraction_static": MEMORY_ON_CPU,
        }
    else:
        arguments["enable_memory_saver"] = True
        if config.cudagraph_capture_sizes is not None:
            arguments["cuda_graph_bs"] = config.cudagraph_capture_sizes
    return arguments


BUILDERS: dict[str, Callable[[RolloutConfig, str, bool], Arguments]] = {
    "vllm": _vllm,
    "sglang": _sglang,
}


def _batched_tokens(config: RolloutConfig) -> int:
    """Prompts that run in one piece must fit a step."""
    if config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    return max(config.max_num_batched_tokens, config.longest_sequence)


def engine_environment(name: str, config: RolloutConfig, device: torch.device) -> dict[str, str]:
    """Variables that an engine is started with, unless the user has set them."""
    if name == "vllm":
        found = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        if device.type == "cpu":
            found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return found
    raw = config.logprobs_mode == "raw_logprobs"
    found = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1" if raw else "0",
        # What it keeps may lie beyond what the model was made for.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device.type == "cpu":
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        if config.tensor_model_parallel_size > 1:
            # One core a rank; without this SGLang wants a NUMA node for each.
            cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
            bound = itertools.islice(cores, config.tensor_model_parallel_size)
            found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, bound))
    return found


def check_filters(traits: SamplerTraits, config: RolloutConfig, params: SamplingParams) -> None:
    """Refuse filters of an engine whose log-probs are from before them, where they are kept."""
    reports_processed = config.calculate_log_probs and config.logprobs_mode != "raw_logprobs"
    if not (traits.log_probs_before_filters and reports_processed):
        return
    plain = SamplingParams(params.max_tokens)
    for key in ("top_k", "top_p", "min_p"):
        value = getattr(params, key)
        if value != getattr(plain, key) and params.temperature > 0:
            raise UnsupportedError(
                f"sampling parameter {key}={value}: SGLang returns log-probs before such filters, "
                "which rollout.logprobs_mode=processed_logprobs does not mean. Takes "
                "raw_logprobs, rollout.calculate_log_probs=False, or another rollout.name"
            )


def params_as_message(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """For the engine's process. Stop strings are looked for here, where tokens can be decoded."""
    message = dataclasses.asdict(params)
    del message["stop"]
    return {**message, "max_tokens": max_tokens, "stop_token_ids": sorted(params.stop_token_ids)}


MEGABYTE = 1 << 20
