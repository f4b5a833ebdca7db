"""`python3 -m caldera.trainer.main_generation_server`: `caldera generate`, asked for with the keys
of a training run, as verl has it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from caldera.commands.generate import run_generation
from caldera.config import PPOTrainerConfig, compose_config
from caldera.config.fields import check_values, default_of, shown, walk
from caldera.config.loader import read_override
from caldera.config.offline import GenerationConfig, check_generation
from caldera.errors import ConfigError, UnsupportedError
from caldera.trainer.entry import ConfigCommand

OUTPUT = "data.output_path"
ROLLOUT = "actor_rollout_ref.rollout"
GROUPS = ("data", "actor_rollout_ref.model", ROLLOUT, "trainer")
"""A generation has the same keys in groups that are called by the last part."""
NOT_THE_SAME = {"engine_kwargs", "remote"}
OTHERWISE = (
    "data.train_files",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.do_sample",
    f"{ROLLOUT}.engine_kwargs",
)
"""Keys that are read in another way."""
OF_TRAINING = (
    "data.val",
    "data.train_batch_size",
    "data.gen_batch_size",
    "data.shuffle",
    "data.seed",
    "data.reward_fn_key",
    "data.dataloader_num_workers",
    "data.filter_overlong_prompts_workers",
    "actor_rollout_ref.model.use_remove_padding",
    f"{ROLLOUT}.log_prob_",
    f"{ROLLOUT}.val_kwargs.",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    f"{ROLLOUT}.calculate_log_probs",
    f"{ROLLOUT}.free_cache_engine",
    f"{ROLLOUT}.mode",
)
"""How keys of these groups begin that say nothing of what is sampled."""


def _check_unread(given: PPOTrainerConfig, usual: PPOTrainerConfig) -> None:
    """No key is set that would change what is sampled, and that nothing here reads."""
    read = {f"{group}.{name}" for group in GROUPS for name in _same(given, group)}
    defaults = {key: value for key, _, value in walk(usual)}
    for key, about, value in walk(given):
        of_sampling = key.startswith(("data.", "actor_rollout_ref.model.", f"{ROLLOUT}."))
        is_read = key in read or key in OTHERWISE or "${" in str(default_of(about))
        if not of_sampling or is_read or key.startswith(OF_TRAINING):
            continue
        if value != defaults.get(key):
            raise UnsupportedError(
                f"{key}={shown(value)} is not read by main_generation_server; leave it out"
            )


def _generation(given: PPOTrainerConfig, output: Any) -> GenerationConfig:
    made = GenerationConfig()
    for group in GROUPS:
        source, place = _group(given, group), _group(made, group.rpartition(".")[2])
        for name in _same(given, group):
            setattr(place, name, getattr(source, name))
    rollout = given.actor_rollout_ref.rollout
    made.data.path, made.data.output_path = _one_file(given.data.train_files), output
    made.data.n_samples = rollout.n
    made.rollout.engine_kwargs = dict(rollout.engine_kwargs.get(rollout.sampler) or {})
    if not rollout.do_sample:
        made.rollout.temperature = 0.0
    made.ray_kwargs = given.ray_kwargs
    return made


def _same(given: PPOTrainerConfig, group: str) -> set[str]:
    """Keys of a group that a generation has, too."""
    ours, theirs = _group(GenerationConfig(), group.rpartition(".")[2]), _group(given, group)
    names: set[str] = vars(ours).keys() & vars(theirs).keys()
    return names - NOT_THE_SAME


def _group(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _one_file(files: Any) -> str:
    listed = [files] if isinstance(files, str) else list(files or [])
    if len(listed) != 1:
        raise ConfigError(f"data.train_files={shown(files)}: takes one file, with the prompts")
    return str(listed[0])


class ServedGeneration(ConfigCommand[Any]):
    """A command whose keys are those of training, and that does what a generation's say."""

    def load(
        self, overrides: Sequence[str], config_name: str, config_path: str | None
    ) -> GenerationConfig:
        """The generation that a config of training asks for, with every value checked."""
        is_output = [text.partition("=")[0].lstrip("+") == OUTPUT for text in overrides]
        of_run = [text for text, told in zip(overrides, is_output, strict=True) if not told]
        given = compose_config(of_run, config_name, config_path, PPOTrainerConfig)
        check_values(given)
        _check_unread(given, compose_config([], "ppo_trainer", None, PPOTrainerConfig))
        outputs = [text for text, told in zip(overrides, is_output, strict=True) if told]
        made = _generation(given, read_override(outputs[-1])[1] if outputs else None)
        check_values(made)
        check_generation(made)
        return made


GENERATE = ServedGeneration(
    prog="python3 -m caldera.trainer.main_generation_server",
    description="""\
`caldera generate` with the keys of `caldera train`: answers to the prompts of
data.train_files, actor_rollout_ref.rollout.n of them each, are written to
data.output_path. Keys of training are not read.

  python3 -m caldera.trainer.main_generation_server data.train_files=test.parquet \\
    actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.n=4 \\
    +data.output_path=out.parquet
""",
    config_name="ppo_trainer",
    schema=PPOTrainerConfig,
    work=run_generation,
)
main = GENERATE.main

if __name__ == "__main__":
    sys.exit(main())
