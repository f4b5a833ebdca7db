"""Sampling from a model and scoring it, as Python calls."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet

from caldera.api.datasets import Dataset, rows_of, write_rows
from caldera.api.rewards import Reward
from caldera.api.runs import Run, show_log
from caldera.api.settings import Values, overrides, settings
from caldera.api.training import rl_settings
from caldera.commands.generate import GENERATE, run_generation
from caldera.commands.generation import RESPONSES
from caldera.config import load_config
from caldera.config.offline import GenerationConfig
from caldera.trainer.main_ppo import run_ppo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATION_KEYS: Mapping[str, tuple[str, ...]] = {
    "n": ("data.n_samples",),
    "max_prompt_length": ("rollout.prompt_length",),
    "max_response_length": ("rollout.response_length",),
    "processes": ("trainer.n_gpus_per_node",),
}


def generate(
    model: str | Path,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    seed: int | None = None,
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> list[Any]:
    """Responses of a model to prompts, plain text or chat messages, in their order.

    A response is a text; with `n` above 1 a list of texts stands for each prompt. `temperature=0`
    is greedy. Other keys are those of `caldera generate --help`.
    """
    show_log()
    arguments = {
        "n": n,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_prompt_length": max_prompt_length,
        "max_response_length": max_response_length,
        "seed": seed,
        **keys,
    }
    values = settings(GenerationConfig, GENERATION_KEYS, arguments, config)
    with tempfile.TemporaryDirectory(prefix="caldera-generate-") as folder:
        file, out = Path(folder, "prompts.jsonl"), Path(folder, "responses.parquet")
        write_rows([{"prompt": prompt} for prompt in prompts], file, "prompts")
        named = {"model.path": str(model), "data.path": str(file), "data.output_path": str(out)}
        run_generation(GENERATE.load(overrides(values | named), "generation", None))
        responses = pyarrow.parquet.read_table(out).column(RESPONSES).to_pylist()
    return [texts[0] for texts in responses] if n == 1 else responses


def evaluate(
    model: str | Path,
    dataset: Dataset,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    n: int = 1,
    temperature: float = 0.0,
    output: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> dict[str, float]:
    """Score a model's responses to a data set, as the validation of a run does.

    Returns the metrics `val-core/...` and `val-aux/...`. Responses are greedy; with a
    `temperature` above 0, `n` are sampled a prompt. `dataset`, `reward` and keys are those of
    `grpo`. The responses are kept in `output`, where it is given.
    """
    show_log()
    rows = rows_of(dataset)
    with tempfile.TemporaryDirectory(prefix="caldera-evaluate-") as scratch:
        arguments: dict[str, Any] = {
            "model": model,
            "dataset": rows,
            "eval_dataset": rows,
            "reward": reward,
            "reward_weights": None,
            "output": scratch if output is None else output,
            "tools": (),
            "environment": None,
            "callbacks": (),
            "config": config,
            **keys,
        }
        values, files = rl_settings("grpo", arguments, "evaluate")
        values |= _validation(n, temperature)
        run = Run(load_config(overrides(values)), run_ppo, files).train()
        row = run.metrics[-1]
    return {name: value for name, value in row.items() if name.startswith("val-")}


def _validation(n: int, temperature: float) -> Values:
    sampled = "actor_rollout_ref.rollout.val_kwargs"
    return {
        "trainer.val_only": True,
        "trainer.val_before_train": True,
        "trainer.resume_mode": "disable",
        "trainer.save_freq": -1,
        f"{sampled}.n": n,
        f"{sampled}.temperature": temperature,
        f"{sampled}.do_sample": temperature > 0,
    }


def load_model(folder: Path) -> PreTrainedModel:
    """The model of a Hugging Face folder, with its adapter where it is one."""
    from transformers import AutoModelForCausalLM

    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        adapted: PreTrainedModel = AutoPeftModelForCausalLM.from_pretrained(folder)
        return adapted
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model
