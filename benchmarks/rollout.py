"""Sampling: the native engine beside Hugging Face `generate`, same weights, one run.

    python benchmarks/rollout.py [--device cpu|cuda] [--model FOLDER] [--requests 64]
        [--prompt-tokens 32] [--new-tokens 64]

Without --model, random weights in a small Llama's shape. Prints response tokens a second of each
and their ratio; prompts differ, every answer has the full length.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from caldera.config import RolloutConfig
from caldera.models.attention import ATTENTION
from caldera.rollout import ROLLOUTS
from caldera.rollout.base import Request, SamplingParams


def build_model(folder: str | None, dtype: torch.dtype) -> torch.nn.Module:
    if folder:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION
        )
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


def tokens_per_second(name: str, module: torch.nn.Module, arguments: argparse.Namespace) -> float:
    """The better of two runs after a warm-up."""
    device = torch.device(arguments.device)
    precision = "bfloat16" if arguments.device == "cuda" else "float32"
    longest = arguments.prompt_tokens + arguments.new_tokens
    config = RolloutConfig(dtype=precision, max_model_len=longest, max_num_seqs=arguments.requests)
    sampler = ROLLOUTS[name](config, module, device)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(
        5, 1000, (arguments.requests, arguments.prompt_tokens), generator=generator
    )
    params = SamplingParams(max_tokens=arguments.new_tokens, ignore_eos=True)
    requests = [Request(row.tolist(), params, seed) for seed, row in enumerate(prompts)]
    sampler.wake_up()
    best = 0.0
    for repetition in range(3):
        start = time.perf_counter()
        completions = sampler.generate(requests)
        seconds = time.perf_counter() - start
        produced = sum(len(completion.token_ids) for completion in completions)
        if repetition:
            best = max(best, produced / seconds)
    sampler.sleep()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    module = build_model(arguments.model, dtype).to(arguments.device).eval()
    speeds = {name: tokens_per_second(name, module, arguments) for name in ("native", "hf")}
    for name, speed in speeds.items():
        sys.stdout.write(f"{name:8s} {speed:10.0f} tokens/s\n")
    sys.stdout.write(f"ratio    {speeds['native'] / speeds['hf']:10.2f}\n")


if __name__ == "__main__":
    main()
