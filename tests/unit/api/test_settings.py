"""Keywords of Python calls as config keys, and values as the command line has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caldera.api.settings import RL_KEYS, RUN_KEYS, free_folder, overrides, settings
from caldera.config import PPOTrainerConfig, load_config
from caldera.config.loader import read_override
from caldera.errors import ConfigError

SHORT = RUN_KEYS | RL_KEYS


def values(config: dict[str, Any] | None = None, **keywords: Any) -> dict[str, Any]:
    return settings(PPOTrainerConfig, SHORT, keywords, config)


def test_short_names_last_words_groups_and_config() -> None:
    assert values(lr=1e-5, n=None) == {"actor_rollout_ref.actor.optim.lr": 1e-5}
    assert values(seed=3) == {"actor_rollout_ref.rollout.seed": 3, "data.seed": 3}
    assert values(clip_ratio_high=0.28) == {"actor_rollout_ref.actor.clip_ratio_high": 0.28}
    assert values(algorithm={"kl_ctrl": {"kl_coef": 0.1}}) == {"algorithm.kl_ctrl.kl_coef": 0.1}
    assert values({"critic.optim": {"lr": 1}, "trainer.nnodes": 2}) == {
        "critic.optim.lr": 1,
        "trainer.nnodes": 2,
    }
    assert values({"custom": {"retriever": {"topk": 3}}}) == {"custom": {"retriever": {"topk": 3}}}


def test_unknown_and_ambiguous_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown keyword 'temprature' \(did you mean"):
        values(temprature=1)
    with pytest.raises(ConfigError, match=r"path: several keys end so, .*name one in config="):
        values(path="x")


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1e-6, True, None, "plain", "a,b c=d", "it's {x} [y]", "back\\slash", "end\\", "a\\'b"),
        *("$HOME", "", ["a,b", "c"], [1, 2.5], {"a": "x, y", "b": [1]}, "日本", "line\nbreak"),
    ],
)
def test_values_survive_the_command_line(value: Any) -> None:
    (text,) = overrides({"custom.value": value})
    assert read_override(text) == ("custom.value", value)
    assert load_config(
        [text, "data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x"]
    ).custom == {"value": value}


def test_numbers_of_numpy_and_paths_and_what_is_neither() -> None:
    assert overrides({"a": np.float64(0.5), "b": Path("/x y")}) == ["a=0.5", "b='/x y'"]
    with pytest.raises(ConfigError, match=r"a=<object .*takes text, numbers"):
        overrides({"a": object()})


def test_a_run_takes_the_first_folder_that_is_free(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "runs", "grpo") == tmp_path / "runs" / "grpo-001"
    (tmp_path / "grpo-001").mkdir()
    assert free_folder(tmp_path, "grpo") == tmp_path / "grpo-002"
