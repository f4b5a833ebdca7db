"""The language head: log-probabilities and entropy, and their gradients, in several forms.

    python benchmarks/head.py [--device cpu|cuda] [--rows 32768] [--width 896]
        [--vocabulary 151936] [--dtype bfloat16] [--repeats 5]

plain: all logits at once, float32 log_softmax, gather, entropy; with as many rows as fit, halved
until they do. PyTorch: caldera's head with its operations for a CPU. Triton: caldera's head as it
is on CUDA. Prints the median of the repetitions; the memory that a step takes beside its inputs;
TFLOP/s of the products a step cannot do without (three, recomputation not counted); and how many
times more rows a second than the plain form. Without a GPU everything is small and in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from caldera.models import head

NAMES = ("log_probs", "entropy")


@dataclass
class Form:
    name: str
    outputs: Callable[[Tensor, Tensor, Tensor], Mapping[Any, Tensor]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of caldera.models.head."""


@dataclass
class Measured:
    rows: int
    forward: float  # seconds
    step: float  # seconds, forward and backward pass
    peak: int | None  # bytes, on CUDA


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Mapping[Any, Tensor]:
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    return {
        "log_probs": log_p.gather(1, labels[:, None]).squeeze(1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Mapping[Any, Tensor]:
    return head.head_outputs(hidden, weight, labels, 1.0, NAMES)


def forms(device: str, dtype: torch.dtype) -> list[Form]:
    if device == "cpu":
        return [Form("plain", plain), Form("PyTorch", chunked)]
    operations = {"row_operations": lambda _: (head.rows_forward, head.rows_backward)}
    small = {"CUDA_BYTES_PER_CHUNK": head.CELLS_PER_CHUNK * dtype.itemsize}
    return [
        Form("plain", plain),
        Form("PyTorch, a CPU's chunks", chunked, operations | small),
        Form("PyTorch", chunked, operations),
        Form("Triton", chunked),
    ]


def seconds(function: Callable[[], object], device: str, repeats: int) -> float:
    """The median, after two runs that do not count."""
    taken = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def measure(form: Form, inputs: tuple[Tensor, Tensor, Tensor], repeats: int) -> Measured:
    hidden, weight, _ = inputs
    device = hidden.device.type

    def forward() -> Tensor:
        return torch.stack([output.mean() for output in form.outputs(*inputs).values()]).sum()

    @torch.no_grad()
    def inference() -> Tensor:
        return forward()

    def step() -> None:
        torch.autograd.grad(forward(), [hidden, weight])

    with ExitStack() as stack:
        for name, value in form.settings.items():
            stack.enter_context(mock.patch.object(head, name, value))
        alone = seconds(inference, device, repeats)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        both = seconds(step, device, repeats)
        peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return Measured(hidden.shape[0], alone, both, peak)


def measure_what_fits(form: Form, inputs: tuple[Tensor, Tensor, Tensor], repeats: int) -> Measured:
    hidden, weight, labels = inputs
    rows = hidden.shape[0]
    while True:
        part = (hidden[:rows].detach().requires_grad_(), weight, labels[:rows])
        try:
            return measure(form, part, repeats)
        except torch.OutOfMemoryError:
            rows //= 2
        torch.cuda.empty_cache()


def make_inputs(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Logits have a deviation of 1."""
    rows, width, vocabulary = arguments.rows, arguments.width, arguments.vocabulary
    torch.manual_seed(0)
    with torch.device(arguments.device):
        dtype = getattr(torch, arguments.dtype)
        hidden = torch.randn(rows, width).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, width).div_(width**0.5).to(dtype).requires_grad_()
        return hidden, weight, torch.randint(vocabulary, (rows,))


def main(argv: list[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    known, _ = parser.parse_known_args(argv)
    large = known.device == "cuda"
    parser.add_argument("--rows", type=int, default=32768 if large else 1024)
    parser.add_argument("--width", type=int, default=896 if large else 256)
    parser.add_argument("--vocabulary", type=int, default=151936 if large else 32768)
    parser.add_argument("--dtype", default="bfloat16" if large else "float32")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    inputs = make_inputs(arguments)
    sys.stdout.write(
        f"{arguments.rows} rows of {arguments.width}, vocabulary {arguments.vocabulary},"
        f" {arguments.dtype}, {arguments.device}\n"
        f"{'form':24s} {'rows':>6s} {'forward':>10s} {'and back':>10s} {'peak':>10s}"
        f" {'TFLOP/s':>8s} ratio\n"
    )
    baseline = None
    for form in forms(arguments.device, inputs[0].dtype):
        found = measure_what_fits(form, inputs, arguments.repeats)
        rate = found.rows / found.step
        baseline = baseline or rate
        peak = "" if found.peak is None else f"{found.peak / 2**30:.2f} GiB"
        tera = 6e-12 * rate * arguments.width * arguments.vocabulary
        sys.stdout.write(
            f"{form.name:24s} {found.rows:6d} {1e3 * found.forward:7.1f} ms"
            f" {1e3 * found.step:7.1f} ms {peak:>10s} {tera:8.2f} {rate / baseline:5.2f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
