"""Training: the engine beside the plain transformers module, same shape, one run.

    python benchmarks/training.py [--device cuda|cpu] [--shapes 0.5B,1.5B] [--part speed,switches]

The peer is a transformers module with PyTorch's own attention on padded rows, whose logits are all
kept and go through a float32 log-softmax. Prints tokens a second (padding does not count), the
share of the matrix products' rate as measured in the same run, peak memory, and ratios. Arithmetic
that is counted: 6 x parameters x tokens, and causal attention; what is computed twice counts once.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from caldera.config import FSDPConfig, OptimizerConfig
from caldera.core_algos import LossScale
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs, packed_model
from caldera.models.attention import ATTENTION
from caldera.models.flops import Arithmetic
from caldera.protocol import DataProto, tensors_of

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "tiny": (128, 512, 4, 4, 2, 4096),
}
WARM, TIMED = 2, 4
PLAIN_HEAD = "plain head: all logits, float32 log-softmax"


@dataclass(frozen=True)
class Figure:
    seconds: float
    gib: float
    tokens: int
    flops: float

    def line(self, name: str, rate: float | None) -> str:
        share = f"{100 * self.flops / self.seconds / rate:5.1f} %" if rate else "      -"
        return (
            f"{name:<46}{1e3 * self.seconds:>9.1f} ms{self.tokens / self.seconds:>12,.0f} tokens/s"
            f"  {share}{self.gib:>8.1f} GiB"
        )


def shape(name: str) -> Qwen2Config:
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )


def build(config: Qwen2Config, attention: str, dtype: torch.dtype, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    assert isinstance(model, nn.Module)
    return model


def rows_of(lengths: list[int], vocabulary: int) -> DataProto:
    """One prompt token, then the answer; padded on the right."""
    width = max(lengths) - 1
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (len(lengths), width + 1), generator=generator)
    mask = (torch.arange(width + 1) < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "responses": ids[:, 1:],
            "attention_mask": mask,
            "response_mask": mask[:, 1:],
        }
    )


def long_tail(count: int, low: int, high: int, mean: float) -> list[int]:
    drawn = np.random.default_rng(0).exponential(mean, count) + low
    return [int(length) for length in drawn.clip(low, high)]


def negative_log_prob(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    mask = tensors_of(rows)["response_mask"]
    loss = scale.aggregate(-outputs["log_probs"], mask, "token-mean")
    return loss, {"loss": loss.detach()}


class Bench:
    """Times of one shape on one device."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.config = shape(name)
        self.device = torch.device(device)

    def measure(self, work: Callable[[], object], lengths: list[int], training: bool) -> Figure:
        on_gpu = self.device.type == "cuda"
        for _ in range(WARM):
            work()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(TIMED):
            work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / TIMED
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(self.config)
        flops = Arithmetic.of(empty).flops(lengths, sum(lengths) - len(lengths), training)
        return Figure(seconds, peak, sum(lengths), flops or 0.0)

    @contextmanager
    def plain(self, dtype: torch.dtype) -> Iterator[Callable[[DataProto, int], None]]:
        """A step of the peer on padded rows, so many at a time."""
        self.clean()
        model = build(self.config, "sdpa", dtype, self.device.type).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

        def step(rows: DataProto, micro: int) -> None:
            tensors = tensors_of(rows)
            total = tensors["response_mask"].sum()
            for start in range(0, len(rows), micro):
                part = {
                    key: tensors[key][start : start + micro].to(self.device)
                    for key in ("input_ids", "attention_mask", "response_mask")
                }
                whole = bool((part["attention_mask"] == 1).all())
                logits = model(
                    input_ids=part["input_ids"],
                    attention_mask=None if whole else part["attention_mask"],
                    use_cache=False,
                ).logits[:, :-1]
                labels = part["input_ids"][:, 1:, None]
                log_probs = logits.float().log_softmax(-1).gather(2, labels).squeeze(2)
                (-(log_probs * part["response_mask"]).sum() / total).backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step

    @contextmanager
    def engine(self, options: EngineOptions) -> Iterator[LocalEngine]:
        self.clean()
        dtype = torch.bfloat16 if options.memory.model_dtype == "bf16" else torch.float32
        model = build(self.config, ATTENTION, dtype, self.device.type)
        engine = LocalEngine(model, self.device, options)
        yield engine

    def clean(self) -> None:
        """Forget the model before."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def train(
        self, options: EngineOptions, lengths: list[int], plan: ForwardPlan
    ) -> tuple[Figure, Figure]:
        """A training step, and log-probs of the same rows without one."""
        rows = rows_of(lengths, self.config.vocab_size)
        with self.engine(options) as engine:
            offloads = options.memory.param_offload or options.memory.optimizer_offload

            def step() -> None:
                if offloads:
                    engine.onload(optimizer=True)
                engine.train(rows, negative_log_prob, plan)
                if offloads:
                    engine.offload()

            training = self.measure(step, lengths, True)
            if offloads:
                return training, training
            inference = self.measure(lambda: engine.infer(rows, plan), lengths, False)
        return training, inference


def matrix_rate(device: torch.device) -> float | None:
    """Operations a second of a large bfloat16 product, on random data."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - start)


def plan_of(max_tokens: int) -> ForwardPlan:
    return ForwardPlan(("log_probs",), True, None, max_tokens)


def options_of(device: str, model_dtype: str, **memory: bool) -> EngineOptions:
    on_gpu = device == "cuda"
    kept = FSDPConfig(model_dtype=model_dtype, dtype="bfloat16" if on_gpu else "float32", **memory)
    return EngineOptions(kept, OptimizerConfig(lr=1e-6), compiles=on_gpu)


def speed(bench: Bench, device: str, rate: float | None) -> None:
    """Equal lengths, then a long tail."""
    on_gpu = device == "cuda"
    count, length = (32, 1024) if on_gpu else (8, 64)
    lengths = [length] * count
    print(f"\n{bench.name}, {count} sequences of {length} tokens")
    peer: Figure | None = None
    if bench.name != "1.5B":  # whose logits alone would take the card
        with bench.plain(torch.bfloat16 if on_gpu else torch.float32) as step:
            rows = rows_of(lengths, bench.config.vocab_size)
            peer = bench.measure(lambda: step(rows, count), lengths, True)
        print(peer.line("plain transformers, padded rows", rate))
    for dtype in ("bf16", "fp32") if on_gpu else ("fp32",):
        for budget in (count * length, count * length // 2):
            figure, inference = bench.train(options_of(device, dtype), lengths, plan_of(budget))
            print(figure.line(f"engine, {dtype} weights, {budget:,} tokens at a time", rate))
            print(inference.line("  log-probs alone", rate))
            if peer is not None:
                print(
                    f"  against plain: {peer.seconds / figure.seconds:.2f} times the tokens/s, "
                    f"{figure.gib / max(peer.gib, 1e-9):.2f} of its memory; "
                    f"log-probs {figure.seconds / inference.seconds:.2f} times training's tokens/s"
                )
    tail = long_tail(64, 64, 2048, 400) if on_gpu else long_tail(16, 8, 256, 40)
    print(f"{len(tail)} sequences of {min(tail)} to {max(tail)} tokens, mean {np.mean(tail):.0f}")
    budget = 32768 if on_gpu else 1024
    figure, _ = bench.train(options_of(device, "fp32"), tail, plan_of(budget))
    print(figure.line("engine", rate))
    if bench.name != "1.5B":
        with bench.plain(torch.bfloat16 if on_gpu else torch.float32) as step:
            rows = rows_of(tail, bench.config.vocab_size)
            padded = bench.measure(lambda: step(rows, max(1, budget // max(tail))), tail, True)
        print(padded.line("plain transformers, padded rows", rate))
        print(f"  packed against padded: {padded.seconds / figure.seconds:.2f} times the tokens/s")


def switches(bench: Bench, device: str, rate: float | None) -> None:
    """Each switch by itself, against the engine as it is by default."""
    lengths = long_tail(64, 64, 2048, 400) if device == "cuda" else long_tail(16, 8, 256, 40)
    budget = 32768 if device == "cuda" else 1024
    usual = options_of(device, "fp32")
    plan = plan_of(budget)
    rows_at_a_time = ForwardPlan(("log_probs",), False, max(1, budget // max(lengths)), None)
    cases: dict[str, tuple[EngineOptions, ForwardPlan]] = {
        "as it is": (usual, plan),
        "micro-batches by rows, not by tokens": (usual, rows_at_a_time),
        PLAIN_HEAD: (usual, plan),
        "not compiled": (replace(usual, compiles=False), plan),
        "gradient checkpointing": (replace(usual, gradient_checkpointing=True), plan),
        "activations offloaded": (replace(usual, activation_offload=True), plan),
        "checkpointing, and what it keeps offloaded": (
            replace(usual, gradient_checkpointing=True, activation_offload=True),
            plan,
        ),
        "parameters and optimiser offloaded between steps": (
            options_of(device, "fp32", param_offload=True, optimizer_offload=True),
            plan,
        ),
    }
    print(f"\n{bench.name}, {len(lengths)} sequences of a long tail: each switch by itself")
    first: Figure | None = None
    for name, (options, own_plan) in cases.items():
        with plain_head() if name == PLAIN_HEAD else nullcontext():
            figure, _ = bench.train(options, lengths, own_plan)
        first = first or figure
        memory = f" {figure.gib / first.gib:5.2f} x memory" if first.gib else ""
        print(f"{figure.line(name, rate)}  {figure.seconds / first.seconds:5.2f} x time{memory}")


@contextmanager
def plain_head() -> Iterator[None]:
    """Meanwhile the engine's head keeps the logits of a whole micro-batch."""
    fused = packed_model.head_outputs

    def plain(
        hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, names: object
    ) -> dict[str, Tensor]:
        logits = (hidden @ weight.t()).float() / temperature
        return {"log_probs": logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)}

    packed_model.head_outputs = plain  # type: ignore[assignment]
    try:
        yield
    finally:
        packed_model.head_outputs = fused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=None)
    parser.add_argument("--part", default="speed,switches")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    names = arguments.shapes or ("0.5B,1.5B" if device.type == "cuda" else "tiny")
    rate = matrix_rate(device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{machine}, torch {torch.__version__}")
    if rate:
        print(f"bfloat16 products: {rate / 1e12:.0f} TFLOP/s")
    parts = {"speed": speed, "switches": switches}
    for name in names.split(","):
        for part in arguments.part.split(","):
            parts[part](Bench(name, device.type), device.type, rate)


if __name__ == "__main__":
    main()
