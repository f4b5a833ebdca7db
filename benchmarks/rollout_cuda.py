"""Sampling on a GPU: the native engine, its exact mode and Hugging Face `generate`, in one run.

    python benchmarks/rollout_cuda.py [--shape 0.5B|tiny] [--repetitions 3] [--without-peer]

Random weights in the shape of Qwen2.5-0.5B, bfloat16, temperature 1, log-probs on, prompts of 128
tokens that all differ; a step of prompts has up to 32,768 tokens. Prints response tokens a second
of the whole call, the median of the repetitions after a first one: 256 and 1,024 answers of 256
tokens, and 1,024 of exponentially distributed lengths (256 on average, 16 to 2,048). Then how long
the first call takes, with compilation and graph capture; how long it takes to go from training to
sampling and back; whether the log-probs of sampler and trainer are equal in exact mode; and how
long a decode step takes beside the time in which the GPU could read weights and cache. The floor of
a whole call adds up what each step must read, or compute where that takes longer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from caldera.config import FSDPConfig, OptimizerConfig, RolloutConfig
from caldera.config.rollout import NativeRolloutConfig
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine
from caldera.models.attention import ATTENTION
from caldera.protocol import DataProto, tensors_of
from caldera.rollout import ROLLOUTS, Rollout
from caldera.rollout.base import Completion, Request, SamplingParams
from caldera.rollout.batch import completions_to_batch
from caldera.rollout.native.blocks import PAGE_SIZE
from caldera.rollout.native.cuda.graphs import MESSAGES
from caldera.workers.weight_sync import WeightSync

CUDA = torch.device("cuda")
SHAPES = {"0.5B": (896, 4864, 24, 14, 2, 151936), "tiny": (128, 512, 4, 4, 2, 4096)}
PROMPT, MEAN, LONGEST = 128, 256, 2048
BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.3e12, 780e12
"""What an H200 copies and multiplies at most, as measured."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def build(name: str) -> nn.Module:
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    with CUDA:
        module: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=torch.bfloat16
        )
    return module.eval()


def requests(lengths: list[int], vocabulary: int) -> list[Request]:
    generator = np.random.default_rng(1)
    return [
        Request(
            generator.integers(5, vocabulary, PROMPT).tolist(),
            SamplingParams(max_tokens=length, ignore_eos=True),
            seed,
        )
        for seed, length in enumerate(lengths)
    ]


def long_tail(count: int) -> list[int]:
    drawn = np.random.default_rng(0).exponential(MEAN, count).clip(16, LONGEST)
    return [int(length) for length in drawn]


def speed(sampler: Rollout, work: list[Request], repetitions: int) -> float:
    found = []
    for repetition in range(repetitions + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        answers = sampler.generate(work)
        seconds = time.perf_counter() - start
        if repetition or repetitions == 0:
            found.append(sum(len(answer.token_ids) for answer in answers) / seconds)
    return statistics.median(found)


def floor(module: nn.Module, token_bytes: int, lengths: list[int]) -> float:
    """Seconds in which a GPU could do it that is busy with nothing but reading and multiplying.

    A step reads all weights once and the keys and values of its sequences, and multiplies each
    token by all weights; of prompts, the head is for their last token alone.
    """
    ended = np.array(lengths)
    weights = sum(p.numel() for p in module.parameters())
    in_layers = weights - module.get_input_embeddings().weight.numel()
    seconds = 2 * (in_layers * PROMPT + weights - in_layers) * len(ended) / OPERATIONS_A_SECOND
    for step in range(1, int(ended.max())):
        running = int((ended > step).sum())
        read = (2 * weights + running * (PROMPT + step) * token_bytes) / BYTES_A_SECOND
        seconds += max(read, 2 * weights * running / OPERATIONS_A_SECOND)
    return seconds


def sampler_of(name: str, module: nn.Module) -> Rollout:
    config = RolloutConfig(
        dtype="bfloat16",
        max_model_len=PROMPT + LONGEST,
        max_num_seqs=1024,
        max_num_batched_tokens=32768,
        gpu_memory_utilization=0.6,
        native=NativeRolloutConfig(exact=name == "exact"),
    )
    sampler = ROLLOUTS["hf" if name == "hf" else "native"](config, module, CUDA)
    sampler.wake_up()
    return sampler


def engine_of(module: nn.Module) -> LocalEngine:
    memory = FSDPConfig(model_dtype="bf16", dtype="bfloat16")
    options = EngineOptions(memory, OptimizerConfig(lr=1e-5), 1.0)
    return LocalEngine(module, CUDA, options)


def rows_of(work: list[Request], answers: list[Completion]) -> DataProto:
    ids = torch.tensor([request.prompt_ids for request in work])
    prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return completions_to_batch(prompts, answers, max(len(a.token_ids) for a in answers), 0, True)


def likelihood(outputs: Any, rows: DataProto, scale: Any) -> Any:
    loss = scale.aggregate(-outputs["log_probs"], tensors_of(rows)["response_mask"], "token-mean")
    return loss, {}


def tell_speeds(shape: str, module: nn.Module, arguments: argparse.Namespace) -> None:
    vocabulary = SHAPES[shape][-1]
    many = {
        "256 x 256": requests([MEAN] * 256, vocabulary),
        "1,024 x 256": requests([MEAN] * 1024, vocabulary),
        "1,024 long-tailed": requests(long_tail(1024), vocabulary),
    }
    native: Any = sampler_of("native", module)
    start = time.perf_counter()
    native.generate(requests([8] * 8, vocabulary))
    torch.cuda.synchronize()
    say(f"first call: {time.perf_counter() - start:.1f} s")
    speeds = {name: speed(native, work, arguments.repetitions) for name, work in many.items()}
    for name, found in speeds.items():
        say(f"native  {name:18s} {found:10,.0f} tokens/s")
    lengths = {"1,024 x 256": [MEAN] * 1024, "1,024 long-tailed": long_tail(1024)}
    bytes_of = native._cache_shape.page_bytes // PAGE_SIZE
    floors = {name: sum(each) / floor(module, bytes_of, each) for name, each in lengths.items()}
    for name, found in floors.items():
        say(f"floor   {name:18s} {found:10,.0f} tokens/s   native {speeds[name] / found:.2f} of it")
    for name, found in (("native", speeds), ("floor", floors)):
        share = found["1,024 long-tailed"] / found["1,024 x 256"]
        say(f"long-tailed over equal lengths, {name}: {share:.2f}")
    tell_steps(native)
    native.sleep()
    exact = sampler_of("exact", module)
    exact.generate(requests([8] * 8, vocabulary))
    for name in ("256 x 256", "1,024 x 256"):
        found = speed(exact, many[name], arguments.repetitions)
        say(f"exact   {name:18s} {found:10,.0f} tokens/s   {found / speeds[name]:.2f} of native")
    exact.sleep()
    if not arguments.without_peer:
        found = speed(sampler_of("hf", module), many["256 x 256"], 0)
        say(f"hf      {'256 x 256':18s} {found:10,.0f} tokens/s")
        say(f"native over hf: {speeds['256 x 256'] / found:.1f}")


def tell_steps(native: Any) -> None:
    """A decode step at a context of 384 tokens, beside reading weights and cache."""
    graphs, state, module = native._runner._graphs, native._runner._state, native.module
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    token = native._cache_shape.page_bytes // PAGE_SIZE
    for size in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
        inputs = np.zeros((5, size), dtype=np.int32)
        inputs[0], inputs[1], inputs[4] = np.arange(size), 384, np.float32(1).view(np.int32)
        state.tables.random_(0, native._cache.pages)
        inputs[2] = 1
        with torch.no_grad():
            for _ in range(MESSAGES):  # which the steps that are timed read in turn
                graphs.run(inputs)
        graph = graphs._captured[size][0]
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        for _ in range(30):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        least = (weights + size * 384 * token) / BYTES_A_SECOND * 1e3
        ms = begin.elapsed_time(end) / 30
        state.mailbox.align()
        say(f"step    {size:5d} sequences {ms:8.3f} ms   floor {least:.3f} ms   {ms / least:.1f} x")


def tell_hand_over(module: nn.Module, vocabulary: int) -> None:
    gc.collect()  # what the samplers before it held
    engine, native = engine_of(module), sampler_of("native", module)
    meeting = WeightSync(engine, native, free_cache=True)
    work = requests([2] * 2, vocabulary)
    plan = ForwardPlan(("log_probs",), False, 2, None)
    held = torch.cuda.memory_allocated()
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with meeting:
            answers = native.generate(work)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
        engine.train(rows_of(work, answers), likelihood, plan)
    more = (torch.cuda.memory_allocated() - held) / 2**20
    middle, most = statistics.median(found[1:]) * 1e3, max(found[1:]) * 1e3
    say(f"train -> sample 2 x 2 tokens -> train: {middle:.1f} ms, {most:.1f} ms at most")
    say(f"memory that stays for sampling, optimiser included: {more:.0f} MiB")


def tell_exactness(module: nn.Module, vocabulary: int) -> None:
    engine, exact = engine_of(module), sampler_of("exact", module)
    work = requests(long_tail(64), vocabulary)
    work = [
        replace(each, params=replace(each.params, max_tokens=min(300, each.params.max_tokens)))
        for each in work
    ]
    for update in range(2):
        exact.version = engine.version
        rows = rows_of(work, exact.generate(work))
        tensors = tensors_of(rows)
        for size in (5, 64):
            found = engine.infer(rows, ForwardPlan(("log_probs",), False, size, None))
            equal = torch.equal(found["log_probs"].cpu(), tensors["rollout_log_probs"].cpu())
            say(f"exact   after {update} updates, {size} sequences a pass: equal {equal}")
        engine.train(rows, likelihood, ForwardPlan(("log_probs",), False, 16, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--without-peer", action="store_true")
    arguments = parser.parse_args()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Qwen2.5 {arguments.shape}")
    module, vocabulary = build(arguments.shape), SHAPES[arguments.shape][-1]
    tell_speeds(arguments.shape, module, arguments)
    tell_exactness(build(arguments.shape), vocabulary)
    tell_hand_over(build(arguments.shape), vocabulary)


if __name__ == "__main__":
    main()
