"""Every key in words: for `--help`, for `--cfg job`, and for the reference page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from caldera.config.fields import Field, default_of, key_name, walk
from caldera.config.loader import config_to_dict
from caldera.config.migrate import MOVED, later_keys, later_reason

SHORT_PROFILE = (
    *("data.train_files", "data.val_files", "data.prompt_key", "data.train_batch_size"),
    *("data.max_prompt_length", "data.max_response_length", "data.filter_overlong_prompts"),
    *("data.truncation", "actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_rank"),
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    *("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    *("actor_rollout_ref.actor.use_dynamic_bsz",),
    *("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor_rollout_ref.actor.ppo_epochs"),
    *("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high"),
    *("actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.entropy_coeff"),
    *("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef"),
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    *("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.n"),
    *("actor_rollout_ref.rollout.temperature", "actor_rollout_ref.rollout.top_p"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    *("algorithm.adv_estimator", "algorithm.use_kl_in_reward", "critic.optim.lr"),
    *("custom_reward_function.path", "trainer.total_epochs", "trainer.total_training_steps"),
    *("trainer.n_gpus_per_node", "trainer.save_freq", "trainer.test_freq", "trainer.logger"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"),
)
"""The keys that most runs set."""
SHORT_ELSEWHERE = (
    *("data.path", "data.output_path", "data.n_samples", "data.response_key", "data.compare_path"),
    *("model.path", "model.partial_pretrain", "model.lora_rank", "optim.lr", "dpo.beta"),
    *("rollout.name", "rollout.temperature", "rollout.top_p", "rollout.top_k"),
    *("rollout.response_length", "server.host", "server.port", "data.max_length"),
)
"""The same of commands other than `caldera train`."""


@dataclass(frozen=True)
class KeyInfo:
    """One key, for a person to read."""

    key: str
    type: str
    default: str
    unit: str
    text: str
    """What it does; of a refused key, why it is refused."""
    refused: bool


def describe(schema: type) -> list[KeyInfo]:
    """Every key of a schema in order."""
    return list(_infos(schema()))


def _infos(config: Any, prefix: str = "") -> Iterator[KeyInfo]:
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{key_name(field)}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _infos(value, f"{key}.")
        else:
            yield _key_info(key, field, type(config))


def _key_info(key: str, field: Field, owner: type) -> KeyInfo:
    meta = field.metadata
    text = _docstrings(owner).get(field.name, "")
    if meta.get("choices"):
        words = [*meta["choices"], *meta["spellings"]]
        text += f" Takes {', '.join(str(word) for word in words)}."
    reason = meta.get("refused")
    if reason:
        met = "".join(f", {_shown(value)}" for value in meta["met"])
        text = f"Takes {_shown(default_of(field))}{met} alone: {reason}."
    return KeyInfo(
        key, _type_name(field), _shown(default_of(field)), meta.get("unit", ""), text, bool(reason)
    )


def _type_name(field: Field) -> str:
    return str(field.type).replace(" | None", " or null").replace("Any", "any")


def _shown(value: Any) -> str:
    """A value as it would be written on the command line."""
    if isinstance(value, str):
        return value.replace("${", "follows ").replace("}", "") if "${" in value else value or "''"
    return _flow(value)


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).split("\n")[0]


def _wrapped(text: str, width: int, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )


@cache
def _docstrings(owner: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, its bases' included."""
    found: dict[str, str] = {}
    for cls in reversed(owner.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found.pop(field.target.id, None)
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    found[field.target.id] = " ".join(str(after.value.value).split())
    return found


# ---------------------------------------------------------------------- for a terminal


def help_text(schema: type, under: str | None = None, width: int = 100) -> str:
    """Every key: those of the short profile first, the refused ones last.

    With `under`, only keys that start with it or end in it.
    """
    infos = describe(schema)
    if under:
        infos = [i for i in infos if f"{i.key}.".startswith(f"{under}.") or i.key.endswith(under)]
        return _entries(infos, width) if infos else f"no key {under!r}\n"
    short = [info for info in infos if info.key in (*SHORT_PROFILE, *SHORT_ELSEWHERE)]
    rest = [info for info in infos if info not in short and not info.refused]
    refused = [info for info in infos if info.refused]
    parts = [(f"All {len(rest)} other keys:" if short else "Keys:", rest)]
    if short:
        parts.insert(0, ("Keys that most runs set:", short))
    if refused:
        parts.append((f"{len(refused)} keys of verl's that this release refuses:", refused))
    return "\n".join(f"{title}\n\n{_entries(group, width)}" for title, group in parts)


def _entries(infos: list[KeyInfo], width: int) -> str:
    lines = []
    for info in infos:
        unit = f", {info.unit}" if info.unit else ""
        lines.append(f"  {info.key}={info.default}  ({info.type}{unit})")
        lines += _wrapped(info.text, width, " " * 6, " " * 6)
    return "\n".join(lines) + "\n"


def annotated_yaml(config: Any, only: tuple[str, ...] = ()) -> str:
    """The resolved config as YAML, with type, unit, default and meaning of each key as comments."""
    infos = {info.key: info for info in describe(type(config))}
    tree = config_to_dict(config)
    return "".join(_yaml_lines(tree, "", infos, only))


def _yaml_lines(
    tree: dict[str, Any], prefix: str, infos: dict[str, KeyInfo], only: tuple[str, ...]
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if only and key not in only and not any(k.startswith(f"{key}.") for k in only):
            continue
        if info := infos.get(key):
            unit = f", {info.unit}" if info.unit else ""
            comment = f"# {info.type}{unit}, default {info.default}. {info.text}"
            for line in _wrapped(comment, 100, indent, f"{indent}# "):
                yield f"{line}\n"
            yield f"{indent}{name}: {_flow(value)}\n"
        else:
            yield f"{indent}{name}:\n"
            yield from _yaml_lines(value, f"{key}.", infos, only)


# ---------------------------------------------------------------------- for the reference page


def short_table(schema: type) -> str:
    """Markdown: the keys of the short profile."""
    infos = [info for info in describe(schema) if info.key in SHORT_PROFILE]
    return _table({info.key: info for info in infos})


def _table(infos: Mapping[str, KeyInfo]) -> str:
    """Keys by what they are called in it."""
    rows = [
        f"| `{name}` | {_cell(i.type)} | `{_cell(i.default)}` | {i.unit} | {_cell(i.text)} |"
        for name, i in infos.items()
    ]
    head = "| key | type | default | unit | meaning |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def reference_tables(schema: type, base: type | None = None) -> str:
    """Markdown: a table of honoured keys a group. With `base`, only what is not the same there."""
    same = describe(base) if base is not None else []
    infos = [info for info in describe(schema) if info not in same]
    groups: dict[str, list[KeyInfo]] = {}
    for info in infos:
        if not info.refused:
            groups.setdefault(info.key.rpartition(".")[0], []).append(info)
    parts = []
    for group, members in groups.items():
        table = _table({info.key.rpartition(".")[2]: info for info in members})
        parts.append(f"### {group or 'Top level'}\n\n{table}")
    return "\n".join(parts)


def moved_table(moves: Mapping[str, str] = MOVED) -> str:
    """Markdown: keys of other releases and their places here."""
    rows = [f"| `{old}` | `{new}` |" for old, new in moves.items()]
    return "| key of another release | here |\n|---|---|\n" + "\n".join(rows) + "\n"


def refused_table(schemas: Mapping[str, type]) -> str:
    """Markdown: the refused keys of all commands, by reason, with the values that they take.

    `schemas` are the commands' configs, each beside the commands' names. A key that only later
    releases of verl have takes its default there.
    """
    users: dict[tuple[str, str, str], list[str]] = {}
    for command, schema in schemas.items():
        for key, field, _ in walk(schema()):
            if reason := field.metadata.get("refused"):
                taken = [default_of(field), *field.metadata["met"]]
                values = ", ".join(f"`{_cell(_shown(value))}`" for value in taken)
                users.setdefault((reason, key, values), []).append(command)
    for key, default in later_keys().items():
        users[later_reason(key), key, f"`{_cell(_shown(default))}`"] = ["later releases of verl"]
    rows = [
        f"| {_cell(reason)} | `{key}` | {values} | {', '.join(commands)} |"
        for (reason, key, values), commands in sorted(users.items())
    ]
    return "| why | key | takes | of |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
