"""Trainings as Python calls: `grpo`, `ppo`, `sft` and `dpo` make a `Run`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from caldera.agent_loop.base import AgentLoopBase
from caldera.api.datasets import Dataset, Prompts, prompts_of, rows_of
from caldera.api.rewards import Reward, name_of, score_function, takes_batch
from caldera.api.runs import OBJECTS, Run, RunFiles
from caldera.api.settings import (
    RL_KEYS,
    RUN_KEYS,
    SUPERVISED_KEYS,
    Values,
    free_folder,
    overrides,
    settings,
)
from caldera.config import PPOTrainerConfig, SFTTrainerConfig
from caldera.config.loader import load_config, load_supervised_config
from caldera.config.preference import DPOTrainerConfig
from caldera.errors import ConfigError, DataError
from caldera.interactions.base import BaseInteraction
from caldera.tools import BaseTool, function_tool
from caldera.tools.function_tool import is_marked
from caldera.trainer.main_ppo import check_responses, run_ppo
from caldera.trainer.sft import train as train_supervised

RUNS = Path("runs")
ONLY_LAST = 1_000_000_000
"""A `save_freq` that no run reaches: the last step alone is saved."""
Callback = Callable[[int, dict[str, float]], Any]
"""Called after each step with its number and metrics. `raise caldera.StopTraining` ends the run."""
S = TypeVar("S", bound=SFTTrainerConfig)
ENVIRONMENT = "environment"
OF_TRAINING = (
    *("eval_dataset", "output", "callbacks", "n", "temperature"),
    *("steps", "epochs", "eval_every", "save_every"),
)
"""Parameters that an evaluation of the run's model does not share."""


def grpo(
    model: str | Path,
    dataset: Dataset,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    eval_dataset: Dataset | None = None,
    reward_weights: Sequence[float] | None = None,
    n: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    temperature: float | None = None,
    lora_rank: int | None = None,
    eval_every: int | None = None,
    save_every: int | None = None,
    seed: int | None = None,
    processes: int | None = None,
    output: str | Path | None = None,
    tools: Sequence[Callable[..., Any] | BaseTool] = (),
    environment: type[BaseInteraction] | type[AgentLoopBase] | None = None,
    callbacks: Sequence[Callback] = (),
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Run[PPOTrainerConfig]:
    """Train with GRPO: sample `n` responses a prompt, reward them, and learn from how each
    compares with the others of its prompt.

    Args:
        model: folder or hub name of a causal language model.
        dataset: rows with a column `prompt`, plain text or chat messages: a list of dicts, a pandas
            DataFrame, a `datasets.Dataset`, or files. Rewards can ask for any other column.
        reward: a function, or several whose (weighted) sum is the reward; see `caldera.api.Reward`
            for what its parameters may be. None: the scorer of each row's `data_source`.
        eval_dataset: held-out rows, validated before the first step, every `eval_every` steps
            (10), and after the last.
        reward_weights: a factor for each function of `reward`; by default 1.
        n: responses a prompt.
        lr: peak learning rate.
        batch_size: prompts a step.
        steps: steps of the run; or `epochs`, passes over the data.
        max_prompt_length: most tokens of a prompt.
        max_response_length: most tokens of a response.
        temperature: of sampling.
        lora_rank: train an adapter of this rank instead of all weights.
        save_every: steps between checkpoints; by default the last step alone is saved.
        seed: of sampling and of the order of the data.
        processes: devices (GPUs, or processes on a CPU) to train on; by default all GPUs, or one
            process.
        output: folder of the run, which goes on from its newest checkpoint; by default a new one,
            `runs/grpo-001` and so on.
        tools: functions (with type hints and a docstring) that the model can call.
        environment: an interaction or agent loop, as a class, that every row is run in.
        callbacks: functions called after each step as `callback(step, metrics)`.
        config: any other keys of `caldera train --help`, dotted or nested.
        **keys: the same by the last word of a key, such as `clip_ratio_high=0.28`.
    """
    return _rl("grpo", {}, locals())


def ppo(
    model: str | Path,
    dataset: Dataset,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    eval_dataset: Dataset | None = None,
    reward_weights: Sequence[float] | None = None,
    critic: str | Path | None = None,
    critic_lr: float | None = None,
    n: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    temperature: float | None = None,
    lora_rank: int | None = None,
    eval_every: int | None = None,
    save_every: int | None = None,
    seed: int | None = None,
    processes: int | None = None,
    output: str | Path | None = None,
    tools: Sequence[Callable[..., Any] | BaseTool] = (),
    environment: type[BaseInteraction] | type[AgentLoopBase] | None = None,
    callbacks: Sequence[Callback] = (),
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Run[PPOTrainerConfig]:
    """Train with PPO: like `grpo`, with a critic (`critic`, by default the model itself) that
    predicts rewards, and generalised advantage estimation. Other estimators and losses are keys:
    `config={"algorithm.adv_estimator": "reinforce_plus_plus"}`."""
    arguments = dict(locals())
    own = {
        "critic.model.path": arguments.pop("critic") or model,
        "critic.optim.lr": arguments.pop("critic_lr"),
    }
    return _rl("gae", own, arguments, "ppo")


def sft(
    model: str | Path,
    dataset: Dataset,
    *,
    eval_dataset: Dataset | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    max_length: int | None = None,
    lora_rank: int | None = None,
    eval_every: int | str | None = None,
    save_every: int | str | None = None,
    seed: int | None = None,
    processes: int | None = None,
    output: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Run[SFTTrainerConfig]:
    """Fine-tune on responses: rows with `messages` (whole conversations), or with `prompt` and
    `completion` (or `response`, `answer`). Other arguments are those of `grpo`; keys are those of
    `caldera sft --help`."""
    return _supervised("sft", SFTTrainerConfig, locals())


def dpo(
    model: str | Path,
    dataset: Dataset,
    *,
    eval_dataset: Dataset | None = None,
    beta: float | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    max_length: int | None = None,
    lora_rank: int | None = None,
    eval_every: int | str | None = None,
    save_every: int | str | None = None,
    seed: int | None = None,
    processes: int | None = None,
    output: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Run[DPOTrainerConfig]:
    """Train on preferences: rows with `prompt`, `chosen` and `rejected`. Other arguments are those
    of `grpo`; keys are those of `caldera dpo --help`."""
    return _supervised("dpo", DPOTrainerConfig, locals())


# ---- What the calls have in common


def _rl(
    estimator: str, own: Values, arguments: dict[str, Any], kind: str | None = None
) -> Run[PPOTrainerConfig]:
    """The run of a call of `grpo` or `ppo`, whose parameters are in `arguments`."""
    values, files = rl_settings(estimator, arguments, kind or estimator)
    given = {key: value for key, value in own.items() if value is not None}
    config = load_config(overrides(given | values))
    check_responses(config)
    call = {name: each for name, each in _with_keys(arguments).items() if name not in OF_TRAINING}
    return Run(config, run_ppo, files, call)


def listed(rewards: Reward | Sequence[Reward] | None) -> list[Reward]:
    """The reward functions of a call."""
    if rewards is None:
        return []
    return list(rewards) if isinstance(rewards, Sequence) else [rewards]


def rl_settings(estimator: str, arguments: dict[str, Any], kind: str) -> tuple[Values, RunFiles]:
    """The values of a call's parameters, and what its run has to write."""
    arguments = _with_keys(arguments)
    folder = _folder(arguments.pop("output"), kind)
    files, values = RunFiles(), _of_every_run(folder, arguments.pop("callbacks"))
    model, dataset, held_out = (
        arguments.pop(name) for name in ("model", "dataset", "eval_dataset")
    )
    rewards, weights = arguments.pop("reward"), arguments.pop("reward_weights")
    values |= {
        "algorithm.adv_estimator": estimator,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.actor.checkpoint.save_contents": [
            "model", "optimizer", "extra", "hf_model",
        ],
        "trainer.validation_data_dir": str(folder / "validation"),
    }  # fmt: skip
    _add_callbacks(values, files, folder)
    train = prompts_of(dataset)
    evaluation = None if held_out is None else prompts_of(held_out, "eval_dataset")
    if rewards is not None:
        _add_rewards(values, files, folder, train, listed(rewards), weights)
    tools, environment = arguments.pop("tools"), arguments.pop(ENVIRONMENT)
    for prompts in (train, *([] if evaluation is None else [evaluation])):
        _add_environment(values, files, folder, environment, prompts)
    _add_tools(values, files, folder, tools, environment)
    files.rows["train.jsonl"] = train.rows
    values["data.train_files"] = [str(folder / "train.jsonl")]
    if evaluation is not None:
        files.rows["eval.jsonl"] = evaluation.rows
        values["data.val_files"] = [str(folder / "eval.jsonl")]
        values["trainer.test_freq"] = 10
    given = arguments.pop("config")
    return values | settings(PPOTrainerConfig, RUN_KEYS | RL_KEYS, arguments, given), files


def _supervised(kind: str, schema: type[S], arguments: dict[str, Any]) -> Run[S]:
    arguments = _with_keys(arguments)
    folder = _folder(arguments.pop("output"), kind)
    files, values = RunFiles(), _of_every_run(folder, arguments.pop("callbacks"))
    _add_callbacks(values, files, folder)
    values |= {
        "model.partial_pretrain": str(arguments.pop("model")),
        "trainer.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    }
    train, held_out = arguments.pop("dataset"), arguments.pop("eval_dataset")
    files.rows["train.jsonl"] = rows = rows_of(train)
    values["data.train_files"] = [str(folder / "train.jsonl")]
    if kind == "sft":
        values |= _columns(rows)
    if held_out is not None:
        files.rows["eval.jsonl"] = rows_of(held_out, "eval_dataset")
        values["data.val_files"] = [str(folder / "eval.jsonl")]
        values["trainer.test_freq"] = 10
    short = RUN_KEYS | SUPERVISED_KEYS
    given = arguments.pop("config")
    values |= settings(schema, short, arguments, given)
    config = load_supervised_config(overrides(values), f"{kind}_trainer", None, schema)
    objective = "supervised:FINE_TUNING" if kind == "sft" else "preference:DIRECT"
    return Run(config, partial(train_supervised, f"caldera.workers.{objective}"), files)


def _with_keys(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a call, its `**keys` among the others."""
    named = dict(arguments)
    keys: dict[str, Any] = named.pop("keys", {})
    return named | keys


def _columns(rows: Sequence[Mapping[str, Any]]) -> Values:
    """Where supervised rows have their prompts and responses."""
    if "messages" in rows[0]:
        return {"data.multiturn.enable": True, "data.multiturn.messages_key": "messages"}
    prompt = next((name for name in ("prompt", "question") if name in rows[0]), None)
    names = ("completion", "response", "answer")
    response = next((name for name in names if name in rows[0]), None)
    if prompt is None or response is None:
        raise DataError(
            "dataset: supervised rows have a column 'messages', or 'prompt' with 'completion', and "
            f"these have {', '.join(map(str, rows[0])) or 'none'}"
        )
    return {"data.prompt_key": prompt, "data.response_key": response}


def _folder(output: str | Path | None, kind: str) -> Path:
    folder = free_folder(RUNS, kind) if output is None else Path(output).expanduser()
    return folder.absolute()  # other processes may be elsewhere


def _of_every_run(folder: Path, callbacks: Sequence[Callback]) -> Values:
    return {
        "trainer.default_local_dir": str(folder),
        "trainer.project_name": "caldera",
        "trainer.experiment_name": folder.name,
        "trainer.logger": ["file"],
        "trainer.save_freq": ONLY_LAST,
        "trainer.callbacks": list(callbacks),
    }


def _add_callbacks(values: Values, files: RunFiles, folder: Path) -> None:
    """Callbacks are called where the run's controller is."""
    for number, callback in enumerate(values.pop("trainer.callbacks")):
        if not callable(callback):
            raise ConfigError(f"callbacks[{number}]={callback!r}: takes callback(step, metrics)")
        name = f"callback_{number}"
        files.objects[name] = callback
        values.setdefault("trainer.callbacks", []).append(f"{folder / OBJECTS}:{name}")


def _add_rewards(
    values: Values,
    files: RunFiles,
    folder: Path,
    prompts: Prompts,
    rewards: Sequence[Reward],
    weights: Sequence[float] | None,
) -> None:
    for each in rewards:
        if not callable(each):
            raise ConfigError(f"reward={each!r}: takes a function, or a list of functions")
    files.objects["reward"] = score_function(rewards, weights, prompts.columns, prompts.are_text)
    values["custom_reward_function.path"] = str(folder / OBJECTS)
    values["custom_reward_function.name"] = "reward"
    if len(rewards) > 1:
        values["reward.log_keys"] = [name_of(each) for each in rewards]
    if any(map(takes_batch, rewards)):
        values["reward_manager.name"] = "batch"


def _add_tools(
    values: Values,
    files: RunFiles,
    folder: Path,
    tools: Iterable[Callable[..., Any] | BaseTool],
    environment: Any,
) -> None:
    tools = list(tools)
    if not tools:
        return
    for number, tool in enumerate(tools):
        files.objects[f"tool_{number}"] = (
            tool if isinstance(tool, BaseTool) or is_marked(tool) else function_tool(tool)
        )
    values["actor_rollout_ref.rollout.multi_turn.function_tool_path"] = str(folder / OBJECTS)
    if environment is None:
        values["actor_rollout_ref.rollout.agent.default_agent_loop"] = "tool_agent"


def _add_environment(
    values: Values, files: RunFiles, folder: Path, environment: Any, prompts: Prompts
) -> None:
    if environment is None:
        return
    where = f"{folder / OBJECTS}:{ENVIRONMENT}"
    rollout = "actor_rollout_ref.rollout"
    if inspect.isclass(environment) and issubclass(environment, AgentLoopBase):
        entry: Any = [{"name": ENVIRONMENT, "_target_": where}]
        key, loop = f"{rollout}.agent.agent_loop_config_path", ENVIRONMENT
    elif inspect.isclass(environment) and issubclass(environment, BaseInteraction):
        entry = {"interaction": [{"name": ENVIRONMENT, "class_name": where}]}
        key, loop = f"{rollout}.multi_turn.interaction_config_path", "tool_agent"
        for row in prompts.rows:
            given = dict(row["extra_info"].get("interaction_kwargs") or {})
            row["extra_info"]["interaction_kwargs"] = {"name": ENVIRONMENT} | given
    else:
        raise ConfigError(
            f"environment={environment!r}: takes a class derived from BaseInteraction or "
            "AgentLoopBase"
        )
    files.objects[ENVIRONMENT] = environment
    files.texts[f"{ENVIRONMENT}.yaml"] = yaml.safe_dump(entry)
    values[key] = str(folder / f"{ENVIRONMENT}.yaml")
    values[f"{rollout}.agent.default_agent_loop"] = loop
