"""Which values a key takes, and that every key says what it does."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from caldera.config import PPOTrainerConfig
from caldera.config.fields import check_values, walk
from caldera.config.loader import SCHEMAS
from caldera.errors import ConfigError, UnsupportedError

Load = Callable[..., PPOTrainerConfig]


def config_classes(config: Any) -> Iterator[type]:
    yield type(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from config_classes(value)


def documented(source: str) -> dict[str, set[str]]:
    """Fields with a docstring under them, by class."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id
                for field, after in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            }
    return found


def test_every_key_that_is_honoured_is_explained() -> None:
    configs = [config for schema in SCHEMAS.values() for config in config_classes(schema())]
    classes = {cls for config in configs for cls in config.__mro__[:-1]}
    assert len(classes) > 20
    silent = []
    for cls in classes:
        explained = documented(inspect.getsource(sys.modules[cls.__module__]))[cls.__name__]
        own = [f for f in dataclasses.fields(cls) if f.name in inspect.get_annotations(cls)]
        for field in own:
            group = dataclasses.is_dataclass(field.default_factory) or (
                field.default_factory is not dataclasses.MISSING
                and dataclasses.is_dataclass(field.default_factory())
            )
            if not group and "refused" not in field.metadata and field.name not in explained:
                silent.append(f"{cls.__name__}.{field.name}")
    assert silent == []


def test_every_refusal_gives_a_reason() -> None:
    reasons = [
        f.metadata["refused"] for _, f, _ in walk(PPOTrainerConfig()) if "refused" in f.metadata
    ]
    assert len(reasons) > 20
    assert all(reasons)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor_rollout_ref.ref.strategy=ddp",
            "actor_rollout_ref.ref.strategy='ddp': takes one of local, fsdp, fsdp2, megatron",
        ),
        ("critic.grad_clip=-1", "critic.grad_clip=-1.0: must be at least 0"),
        ("algorithm.gamma=1.5", "algorithm.gamma=1.5: must be from 0 to 1"),
        ("algorithm.lam=-0.5", "algorithm.lam=-0.5: must be from 0 to 1"),
        (
            "actor_rollout_ref.actor.kl_loss_coef=nan",
            "actor_rollout_ref.actor.kl_loss_coef=nan: takes a number",
        ),
    ],
)
def test_values_that_a_key_does_not_take(load: Load, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(override)
    assert str(raised.value) == message


def test_bounds_are_included(load: Load) -> None:
    algorithm = load("algorithm.gamma=0", "algorithm.lam=1").algorithm
    assert (algorithm.gamma, algorithm.lam) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.model.use_remove_padding=False", "always packed without padding"),
        ("actor_rollout_ref.actor.use_prefix_grouper=True", "prompts are computed once a sample"),
        ("trainer.esi_redundant_time=60", "by save_freq alone"),
        ("algorithm.no_think_rl=true", "is trained like all that it says"),
    ],
)
def test_a_refused_key_says_why(load: Load, override: str, reason: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UnsupportedError) as raised:
        load(override)
    assert str(raised.value).startswith(f"{key}=")
    assert reason in str(raised.value)


def test_a_refused_key_takes_its_default(load: Load) -> None:
    default = "algorithm.no_think_rl=false"
    load("actor_rollout_ref.model.use_remove_padding=True", "trainer.nnodes=1", default)


def test_a_refused_key_takes_what_happens_anyway(load: Load) -> None:
    load("actor_rollout_ref.actor.use_torch_compile=False")
    load("actor_rollout_ref.actor.entropy_checkpointing=True")


def test_a_refused_key_that_follows_another_takes_the_others_value(load: Load) -> None:
    name = "actor_rollout_ref.rollout.prometheus.served_model_name"
    load(f"{name}=M", "actor_rollout_ref.actor.use_remove_padding=True")
    with pytest.raises(UnsupportedError, match=rf"^{re.escape(name)}='other' is"):
        load(f"{name}=other")


@pytest.mark.parametrize("schema", list(dict.fromkeys(SCHEMAS.values())))
def test_defaults_are_values_that_their_keys_take(schema: type) -> None:
    for key, field, value in walk(schema()):
        choices = field.metadata.get("choices")
        follows = isinstance(value, str) and value.startswith("${")
        assert not choices or value is None or follows or value in choices, key


def test_no_key_takes_just_anything() -> None:
    unions = {"train_files", "val_files", "logger", "console_metrics", "save_freq", "test_freq"}
    unions |= {"callbacks"}
    unions |= {"target_modules", "exclude_modules", "url"}
    unions |= {"rollout_is_threshold", "rollout_rs_threshold"}
    for schema in SCHEMAS.values():
        for key, field, _ in walk(schema()):
            name = key.rsplit(".", 1)[-1]
            assert str(field.type) not in ("object", "dict", "list"), key
            assert (str(field.type) == "Any") <= (name in unions), key


def test_nothing_but_the_first_bad_value_is_told(load: Load) -> None:
    config = load()
    config.data.truncation, config.trainer.device = "up", "tpu"
    with pytest.raises(ConfigError, match=r"^data\.truncation='up'"):
        check_values(config)
