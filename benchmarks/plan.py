"""Memory: what `caldera plan` predicts beside what a step of GRPO takes, by phase.

    python benchmarks/plan.py [--shapes 0.5B,1.5B] [--held fp32,bf16] [--prompts 16] [--n 8]
        [--prompt-tokens 256] [--new-tokens 256] [--micro-tokens 16384]

Random weights in the shapes of Qwen2.5, answers of the full length, all in this process on one GPU.
`fp32` is how a run holds a model by default: float32 parameters, a bfloat16 copy for the sampler,
layers computed again in the backward pass. `bf16` has bfloat16 parameters that the sampler shares,
and keeps activations. The second step is measured: the optimiser has its state by then. Prints
predicted and measured peak (torch.cuda.max_memory_allocated) and their ratio; on a CPU, predictions
alone, after a step in a tiny shape. Ends with status 1 where a ratio is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from caldera.commands.plan_memory import Held, Pass, Sampler, inference, sampling, training
from caldera.commands.planning import ModelShape
from caldera.config import FSDPConfig, OptimizerConfig, RolloutConfig
from caldera.core_algos import LossScale
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.models.attention import ATTENTION
from caldera.protocol import DataProto, tensors_of
from caldera.rollout.base import Completion, Request, SamplingParams
from caldera.rollout.batch import completions_to_batch
from caldera.rollout.native.engine import NativeRollout
from caldera.workers.weight_sync import WeightSync

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "tiny": (128, 512, 4, 4, 2, 4096),
}
PHASES = ("rollout", "log-prob", "update")
TOLERANCE = 0.15


@dataclass(frozen=True)
class Case:
    """One shape, held in one way, and the step that it takes."""

    name: str
    held: str
    device: torch.device
    arguments: argparse.Namespace

    @property
    def rows(self) -> int:
        return int(self.arguments.prompts * self.arguments.n)

    @property
    def length(self) -> int:
        return int(self.arguments.prompt_tokens + self.arguments.new_tokens)

    @property
    def is_default(self) -> bool:
        return self.held == "fp32"

    def config(self) -> Qwen2Config:
        hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[self.name]
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

    def predicted(self) -> dict[str, int]:
        """Bytes of each phase, as `caldera plan` works them out."""
        with torch.device("meta"):
            shape = ModelShape.of(AutoModelForCausalLM.from_config(self.config()))
        held = Held(shape, 4 if self.is_default else 2, 2, checkpoints=self.is_default)
        rows = min(self.rows, self.arguments.micro_tokens // self.length)
        work = Pass(rows * self.length, rows * self.arguments.new_tokens, self.rows > rows)
        sampler = Sampler(
            shape,
            2,
            self.is_default,
            self.rows,
            self.arguments.prompt_tokens,
            self.arguments.new_tokens,
            256,
            8192,
        )
        phases = {
            "rollout": held.resident | sampling(sampler),
            "log-prob": inference(held, work) | {"sampler's weights": sampler.weights},
            "update": training(held, work) | {"sampler's weights": sampler.weights},
        }
        return {name: sum(parts.values()) for name, parts in phases.items()}


class Step:
    """The parts of a run on one device, and a step with them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        on_gpu = case.device.type == "cuda"
        kept = torch.float32 if case.is_default else torch.bfloat16
        torch.manual_seed(0)
        with case.device:
            model: nn.Module = AutoModelForCausalLM.from_config(
                case.config(), attn_implementation=ATTENTION, dtype=kept
            )
        own = copy.deepcopy(model).to(torch.bfloat16) if case.is_default else model
        memory = FSDPConfig(model_dtype=case.held, dtype="bfloat16")
        options = EngineOptions(
            memory,
            OptimizerConfig(lr=1e-6),
            1.0,
            compiles=on_gpu,
            gradient_checkpointing=case.is_default,
        )
        self.engine = LocalEngine(model, case.device, options)
        rollout = RolloutConfig(
            dtype="bfloat16", gpu_memory_utilization=0.9, max_model_len=case.length
        )
        self.sampler = NativeRollout(rollout, own, case.device)
        self.meeting = WeightSync(self.engine, self.sampler, free_cache=True)
        self.peaks: dict[str, int] = {}

    def run(self) -> None:
        """Sample, compare with the group, compute log-probs, update."""
        arguments, vocabulary = self.case.arguments, self.case.config().vocab_size
        generator = torch.Generator().manual_seed(self.engine.version)
        shape = (arguments.prompts, arguments.prompt_tokens)
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        ids = ids.repeat_interleave(arguments.n, 0)  # (B, P)
        prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        completions = self._measured("rollout", lambda: self._sample(ids.tolist()))
        rows = completions_to_batch(prompts, completions, arguments.new_tokens, 0, True)
        rewards = torch.rand(self.case.rows, generator=generator).view(-1, arguments.n)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        tensors_of(rows)["advantages"] = advantages.view(-1, 1).expand(-1, arguments.new_tokens)
        plan = ForwardPlan(("log_probs", "entropy"), True, None, arguments.micro_tokens)
        old = self._measured("log-prob", lambda: self.engine.infer(rows, plan))
        tensors_of(rows)["old_log_probs"] = old["log_probs"]
        plan = ForwardPlan(("log_probs",), True, None, arguments.micro_tokens)
        self._measured("update", lambda: self.engine.train(rows, clipped_loss, plan))

    def _sample(self, prompts: list[list[int]]) -> list[Completion]:
        params = SamplingParams(self.case.arguments.new_tokens)
        requests = [Request(ids, params, seed) for seed, ids in enumerate(prompts)]
        with self.meeting:
            return self.sampler.generate(requests)

    def _measured(self, phase: str, work: Callable[[], Any]) -> Any:
        if self.case.device.type != "cuda":
            return work()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        answer = work()
        torch.cuda.synchronize()
        self.peaks[phase] = torch.cuda.max_memory_allocated()
        return answer


def clipped_loss(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    tensors = tensors_of(rows)
    ratio = (outputs["log_probs"] - tensors["old_log_probs"]).exp()
    gain = torch.minimum(
        ratio * tensors["advantages"], ratio.clamp(0.8, 1.2) * tensors["advantages"]
    )
    loss = scale.aggregate(-gain, tensors["response_mask"], "token-mean")
    return loss, {"loss": loss.detach()}


def compare(case: Case) -> bool:
    """Print predicted and measured peaks; whether all of them are near."""
    gc.collect()
    torch._dynamo.reset()
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
    step = Step(case)
    for _ in range(2):
        step.run()
    predicted, near = case.predicted(), True
    print(f"\n{case.name}, {case.held}: {case.rows} samples of {case.length} tokens")
    for phase in PHASES:
        line = f"  {phase:<10}predicted {predicted[phase] / 2**30:7.2f} GiB"
        if phase in step.peaks:
            ratio = predicted[phase] / step.peaks[phase]
            near = near and abs(ratio - 1) <= TOLERANCE
            line += f"   measured {step.peaks[phase] / 2**30:7.2f} GiB   ratio {ratio:.3f}"
        print(line, flush=True)
    return near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=None)
    parser.add_argument("--held", default="fp32,bf16")
    for name, value in (
        ("prompts", 16),
        ("n", 8),
        ("prompt-tokens", 256),
        ("new-tokens", 256),
        ("micro-tokens", 16384),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        arguments.prompts, arguments.n, arguments.prompt_tokens, arguments.new_tokens = 2, 2, 8, 8
    print(torch.cuda.get_device_name() if on_gpu else "CPU", "torch", torch.__version__)
    names = arguments.shapes or ("0.5B,1.5B" if on_gpu else "tiny")
    near = [
        compare(Case(name, held, device, arguments))
        for name in names.split(",")
        for held in arguments.held.split(",")
    ]
    return 0 if all(near) else 1


if __name__ == "__main__":
    sys.exit(main())
