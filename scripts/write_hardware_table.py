"""Write docs/reference/hardware.md: which model trains on which GPUs, as `caldera plan` predicts.

python scripts/write_hardware_table.py           write the page: two minutes
python scripts/write_hardware_table.py --check   fail if the row of 7B is not up to date: seconds
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from caldera.commands import planning
from caldera.config import PPOTrainerConfig, compose_config
from caldera.config.fields import check_values
from caldera.config.model import ModelConfig
from caldera.config.validate import check_consistency
from caldera.models.loading import shape_of_policy

PAGE = Path(__file__).parents[1] / "docs/reference/hardware.md"
GPUS = {"24 GB": "4090", "48 GB": "l40s", "80 GB": "h100", "141 GB": "h200"}
COUNTS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Shape:
    """A model of Qwen2.5, by the numbers of its config.json."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 152064
    tied: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 32768,
        }


SHAPES = (
    Shape("0.5B", 896, 24, 14, 2, 4864, 151936, tied=True),
    Shape("1.5B", 1536, 28, 12, 2, 8960, 151936, tied=True),
    Shape("3B", 2048, 36, 16, 2, 11008, 151936, tied=True),
    Shape("7B", 3584, 28, 28, 4, 18944),
    Shape("14B", 5120, 48, 40, 8, 13824),
    Shape("32B", 5120, 64, 40, 8, 27648),
    Shape("72B", 8192, 80, 64, 8, 29568),
)
TASK = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=128",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
)
SMALL = tuple(
    f"actor_rollout_ref.{key}=4096"
    for key in ("actor.ppo_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu")
)
OFFLOAD = tuple(
    f"actor_rollout_ref.actor.fsdp_config.{key}=True"
    for key in ("param_offload", "optimizer_offload")
)
PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
BF16 = ("actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",)
LORA = ("actor_rollout_ref.model.lora_rank=32", *BF16)
TABLES: tuple[tuple[str, ...], ...] = ((), BF16, LORA)
WAYS = {"": (), "s": SMALL, "o": (*SMALL, *OFFLOAD)}
"""What is tried, in this order, and its letter in the table."""


def page() -> str:
    return f"""# Which model on which GPU

<!-- Written by scripts/write_hardware_table.py: run it again after a change of `caldera plan`. -->

Find the smallest number of GPUs on which a model trains. For your own lengths and sizes, ask
[`caldera plan`](../plan.md), from which these tables come:

<!-- not executed: a fragment -->

```bash
caldera plan --device 4090 actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \\
  algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
  data.max_prompt_length=512 data.max_response_length=1024
```

The task is GRPO without KL: 128 prompts of 512 tokens, 8 responses of 1,024 tokens each,
mini-batches of 64 prompts; models have the shapes of Qwen2.5. A cell is the smallest of
{_listed(COUNTS)} GPUs, eight a machine, sharded by FSDP.

| letter | the run needs | keys |
| -- | -- | -- |
| s | micro-batches of 4,096 tokens instead of 16,384 | {_keys(SMALL)} |
| o | the same, and idle parameters and optimiser in host memory | {_keys(OFFLOAD)} |
| t2, t4, t8 | the sampler's weights split over so many GPUs | `{PARALLEL}` |

## All weights, float32

The default: float32 parameters and optimiser, products in bfloat16.

{table(TABLES[0])}
## All weights, bfloat16

With {_keys(BF16)}:
half the memory of weights, gradients and optimiser. Updates are rounded to bfloat16.

{table(TABLES[1])}
## LoRA of rank 32

With `actor_rollout_ref.model.lora_rank=32` and bfloat16 base weights.

{table(TABLES[2])}
## Limits

- These are predictions of peaks, not runs: on an H200 they were
  [compared with measured ones](../performance.md#predicted-memory) for 0.5B and 1.5B. Training on
  several GPUs is untested ([what is tested](../tested.md)).
- Offloading takes host memory: 12 bytes a parameter in float32.
- A critic is a second model of the same size; `caldera plan algorithm.adv_estimator=gae` counts it.
- Mixtures of experts, Megatron and samplers other than the native one are not planned.
"""


def table(keys: tuple[str, ...]) -> str:
    lines = [f"| model | {' | '.join(GPUS)} |", "| -- " * (1 + len(GPUS)) + "|"]
    smallest = dict.fromkeys(GPUS.values(), 1)  # a larger model needs no fewer
    for shape in SHAPES:
        cells = []
        for device in GPUS.values():
            smallest[device], text = cell(shape, device, keys, smallest[device])
            cells.append(text)
        lines.append(f"| {shape.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def cell(shape: Shape, device: str, keys: tuple[str, ...], smallest: int) -> tuple[int, str]:
    """The number of GPUs, and what the table says of it."""
    for count in COUNTS:
        for letter, way in WAYS.items():
            for ranks in (1, 2, 4, 8):
                if count < smallest or shape.kv_heads % ranks or ranks > min(count, 8):
                    continue
                config = copy.deepcopy(config_of(shape, count, ranks, (*keys, *way)))
                if planning.make_plan(config, planning.device_bytes(device)).fits:
                    letters = [letter] * bool(letter) + [f"t{ranks}"] * (ranks > 1)
                    return count, f"{count} {', '.join(letters)}".strip()
    return COUNTS[-1] + 1, f"more than {COUNTS[-1]}"


@cache
def config_of(shape: Shape, count: int, ranks: int, keys: tuple[str, ...]) -> PPOTrainerConfig:
    overrides = [
        *TASK,
        *keys,
        f"actor_rollout_ref.model.path={folder(shape)}",
        f"{PARALLEL}={ranks}",
        f"trainer.n_gpus_per_node={min(count, 8)}",
        f"trainer.nnodes={max(1, count // 8)}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "data.train_files=unnamed.parquet",
        "data.val_files=unnamed.parquet",
    ]
    config = compose_config(overrides, "ppo_trainer", None, PPOTrainerConfig)
    check_values(config)
    check_consistency(config)
    return config


@cache
def folder(shape: Shape) -> str:
    path = Path(tempfile.mkdtemp(prefix="shape-"))
    (path / "config.json").write_text(json.dumps(shape.config()))
    return str(path)


def _keys(keys: tuple[str, ...]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _listed(counts: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, counts[:-1]))} or {counts[-1]}"


def remember_shapes() -> None:
    """Building a model's modules takes most of a plan's time."""
    build = shape_of_policy
    built: dict[tuple[str, int], nn.Module] = {}

    def remembered(config: ModelConfig, key: str) -> nn.Module:
        name = (str(config.path), config.lora_rank)
        if name not in built:
            built[name] = build(config, key)
        return built[name]

    vars(planning)["shape_of_policy"] = remembered


def check() -> int:
    """The row of one model, on large GPUs."""
    shape = next(shape for shape in SHAPES if shape.name == "7B")
    rows = [
        line.split(" | ")
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| {shape.name} |")
    ]
    stale = len(rows) != len(TABLES)
    for keys, row in zip(TABLES, rows, strict=False):
        for number, device in list(enumerate(GPUS.values(), start=1))[2:]:
            is_there = row[number].removesuffix(" |")
            if (wanted := cell(shape, device, keys, 1)[1]) != is_there:
                print(f"{PAGE}: {shape.name} on {device}: {is_there!r}, now {wanted!r}")
                stale = True
    if stale:
        print("run python scripts/write_hardware_table.py")
    return int(stale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    is_check = parser.parse_args().check
    remember_shapes()
    if is_check:
        return check()
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
