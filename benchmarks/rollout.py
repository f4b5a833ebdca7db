"""Sampling: the native engine beside Hugging Face `generate`, same weights, one run.

    python benchmarks/rollout.py [--device cpu|cuda] [--model FOLDER] [--requests 64]
        [--prompt-tokens 32] [--new-tokens 64] [--long-tailed] [--samplers native exact hf]

Without --model, random weights in a small Llama's shape. Prints response tokens a second of each
and their ratio to the last; prompts differ. Every answer has the full length, or with --long-tailed
an exponentially distributed one, a quarter of it on average: `generate` then samples all answers of
its batch to the length of the longest, and what is too much is not counted.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from caldera.config import RolloutConfig
from caldera.config.rollout import NativeRolloutConfig
from caldera.models.attention import ATTENTION
from caldera.rollout import ROLLOUTS
from caldera.rollout.base import Request, SamplingParams


def build_model(folder: str | None, dtype: torch.dtype) -> torch.nn.Module:
    if folder:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION
        )
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


def lengths(arguments: argparse.Namespace) -> list[int]:
    """Response tokens of each request."""
    longest, count = arguments.new_tokens, arguments.requests
    if not arguments.long_tailed:
        return [longest] * count
    generator = torch.Generator().manual_seed(2)
    drawn = torch.empty(count).exponential_(4 / longest, generator=generator)
    return drawn.ceil().clamp(1, longest).int().tolist()


def tokens_per_second(name: str, module: torch.nn.Module, arguments: argparse.Namespace) -> float:
    """The best of the repetitions after a warm-up."""
    device = torch.device(arguments.device)
    precision = "bfloat16" if arguments.device == "cuda" else "float32"
    config = RolloutConfig(
        dtype=precision,
        max_model_len=arguments.prompt_tokens + arguments.new_tokens,
        max_num_seqs=arguments.requests,
        native=NativeRolloutConfig(exact=name == "exact"),
    )
    sampler = ROLLOUTS["hf" if name == "hf" else "native"](config, module, device)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(
        5, 1000, (arguments.requests, arguments.prompt_tokens), generator=generator
    )
    wanted = lengths(arguments)
    sampled = [max(wanted)] * len(wanted) if name == "hf" else wanted
    requests = [
        Request(row.tolist(), SamplingParams(max_tokens=length, ignore_eos=True), seed)
        for seed, (row, length) in enumerate(zip(prompts, sampled, strict=True))
    ]
    sampler.wake_up()
    sampler.generate([Request([5], SamplingParams(max_tokens=2), 0)])
    best = 0.0
    for _ in range(arguments.repetitions):
        start = time.perf_counter()
        sampler.generate(requests)
        best = max(best, sum(wanted) / (time.perf_counter() - start))
    sampler.sleep()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--long-tailed", action="store_true")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument(
        "--samplers", nargs="+", choices=["native", "exact", "hf"], default=["native", "hf"]
    )
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    module = build_model(arguments.model, dtype).to(arguments.device).eval()
    speeds = {name: tokens_per_second(name, module, arguments) for name in arguments.samplers}
    last = speeds[arguments.samplers[-1]]
    for name, speed in speeds.items():
        sys.stdout.write(f"{name:8s} {speed:10.1f} tokens/s   ratio {speed / last:6.2f}\n")


if __name__ == "__main__":
    main()
