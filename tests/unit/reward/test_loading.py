"""Reward managers by name and from a file, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from caldera.config import PPOTrainerConfig, load_config
from caldera.errors import ConfigError, RegistryError
from caldera.protocol import DataProto
from caldera.reward import (
    DAPORewardManager,
    NaiveRewardManager,
    compute_reward,
    load_reward_manager,
)

MakeData = Callable[..., DataProto]


def load(*overrides: str) -> PPOTrainerConfig:
    required = [
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "actor_rollout_ref.model.path=M",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=grpo",
    ]
    return load_config([*required, *overrides])


def test_the_arguments_come_from_the_configuration(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, tmp_path: Path
) -> None:
    source = tmp_path / "lengths.py"
    source.write_text(
        "def length(data_source, solution_str, ground_truth, extra_info=None, factor=1, plus=0):\n"
        "    return {'score': len(solution_str) * factor + plus, 'source': data_source}\n"
    )
    config = load(
        "data.reward_fn_key=kind",
        "+reward_model.reward_kwargs={factor: 2, plus: 100}",
        f"custom_reward_function.path={source}",
        "custom_reward_function.name=length",
        "+custom_reward_function.reward_kwargs.plus=0.5",
    )
    manager = load_reward_manager(config, tokenizer, num_examine=0)
    rewards, extra = compute_reward(make_data([("1=", "123", "1")], kind=["k"]), manager)
    assert rewards.tolist() == [[0, 0, 6.5]]
    assert extra == {"score": [6.5], "source": ["k"]}


def test_by_default_the_data_source_chooses_the_scorer(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    manager = load_reward_manager(load(), tokenizer, num_examine=0)
    rewards, _ = compute_reward(make_data([("1+1=", "2", "2")]), manager)
    assert rewards.tolist() == [[1, 0, 0]]


def test_either_key_names_the_manager(tokenizer: PreTrainedTokenizerFast) -> None:
    by_old_key = load_reward_manager(load("reward_model.reward_manager=dapo"), tokenizer, 0)
    assert type(by_old_key) is DAPORewardManager
    by_new_key = load_reward_manager(load("reward_manager.name=dapo"), tokenizer, 0)
    assert type(by_new_key) is DAPORewardManager
    assert type(load_reward_manager(load(), tokenizer, 0)) is NaiveRewardManager


def test_an_unknown_reward_manager(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        RegistryError,
        match=r"reward_model\.reward_manager \(or reward_manager\.name\) 'naiv'; "
        r"did you mean 'naive'\? \(known: .*dapo.*naive",
    ):
        load_reward_manager(load("reward_model.reward_manager=naiv"), tokenizer, num_examine=0)


DAPO = (
    "reward_model.reward_manager=dapo",
    "+reward_model.reward_kwargs.overlong_buffer_cfg={enable: true, len: 2, penalty_factor: 1}",
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.max_response_length=3"], 3),
        (["data.max_response_length=3", "+reward_model.reward_kwargs.max_resp_len=null"], 3),
        (["data.max_response_length=3", "+reward_model.reward_kwargs.max_resp_len=9"], 9),
    ],
)
def test_the_longest_response_is_that_of_the_data_unless_given(
    tokenizer: PreTrainedTokenizerFast, overrides: list[str], expected: int
) -> None:
    manager = load_reward_manager(load(*DAPO, *overrides), tokenizer, 0)
    assert isinstance(manager, DAPORewardManager)
    assert manager.overlong is not None and manager.overlong.max_length == expected


def test_a_batch_needs_a_function_of_ones_own(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match=r"^custom_reward_function\.path=null: .*'batch' needs"):
        load_reward_manager(load("reward_model.reward_manager=batch"), tokenizer, 0)


@pytest.fixture
def managers(tmp_path: Path) -> Path:
    source = tmp_path / "managers.py"
    source.write_text(
        "from caldera.reward import NaiveRewardManager\n"
        "class Doubled(NaiveRewardManager):\n"
        "    def __call__(self, data, return_dict=False):\n"
        "        result = super().__call__(data, return_dict=True)\n"
        "        result['reward_tensor'] *= 2\n"
        "        return result if return_dict else result['reward_tensor']\n"
        "class OfOneFile:\n"
        "    def __init__(self, **arguments):\n"
        "        self.arguments = arguments\n"
        "    def __call__(self, data, return_dict=False): ...\n"
        "class NoCall: ...\n"
        "def function(data): ...\n"
    )
    return source


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_manager_from_a_file(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, managers: Path, scheme: str
) -> None:
    config = load(
        "reward_manager.source=importlib",
        f"reward_manager.module.path={scheme}{managers}",
        "reward_manager.module.name=Doubled",
        "reward_model.reward_manager=no_such_name",  # nobody asks the registry
    )
    manager = load_reward_manager(config, tokenizer, num_examine=0)
    rewards, extra = compute_reward(make_data([("1+1=", "2", "2"), ("1+1=", "3", "2")]), manager)
    assert rewards.tolist() == [[2, 0, 0], [0, 0, 0]]
    assert extra["acc"] == [1, 0]


def test_a_manager_from_a_file_gets_the_same_arguments(
    tokenizer: PreTrainedTokenizerFast, managers: Path
) -> None:
    config = load(
        "reward_manager.source=importlib",
        f"reward_manager.module.path={managers}",
        "reward_manager.module.name=OfOneFile",
        "data.reward_fn_key=kind",
        "+reward_model.reward_kwargs.weight=3",
    )
    manager = load_reward_manager(config, tokenizer, num_examine=5)
    assert manager.arguments == {  # type: ignore[attr-defined]
        "tokenizer": tokenizer,
        "num_examine": 5,
        "compute_score": None,
        "reward_fn_key": "kind",
        "weight": 3,
    }


def test_a_manager_from_a_package(tokenizer: PreTrainedTokenizerFast) -> None:
    config = load(
        "reward_manager.source=importlib",
        "reward_manager.module.path=pkg://caldera.reward.managers",
        "reward_manager.module.name=DAPORewardManager",
    )
    assert type(load_reward_manager(config, tokenizer, 0)) is DAPORewardManager


def test_mistakes_in_naming_a_file(tokenizer: PreTrainedTokenizerFast, managers: Path) -> None:
    source = "reward_manager.source=importlib"
    path = f"reward_manager.module.path={managers}"
    for overrides, said in [
        ([source], r"reward_manager.module.path=null: .*importlib needs"),
        ([source, path], r"reward_manager.module: .* has no 'custom_reward_manager'; it defines"),
        ([source, path, "reward_manager.module.name=NoCall"], r"'NoCall' .* must be a class with"),
        ([source, path, "reward_manager.module.name=function"], r"'function' .* must be a class"),
        ([path], r"reward_manager.module.path='.*managers.py' is given, .* takes importlib"),
    ]:
        with pytest.raises(ConfigError, match=said):
            load_reward_manager(load(*overrides), tokenizer, 0)


FUNCTIONS = """
import functools

def fine(data_source, solution_str, ground_truth, extra_info=None): ...
def any_keywords(**call): ...
def with_more(data_source, solution_str, ground_truth, extra_info, raw_prompt, factor): ...
def other_names(answer, truth): ...
def three(data_source, solution_str, ground_truth): ...
def by_place(data_source, solution_str, ground_truth, extra_info=None, /): ...
def of_batches(data_sources, solution_strs, ground_truths, extra_infos): ...

def adapted(function):
    @functools.wraps(function)
    def call(data_source, solution_str, ground_truth, extra_info=None):
        return function(solution_str, ground_truth)
    return call

decorated = adapted(other_names)
built_in = dict
"""
FACTOR = "+reward_model.reward_kwargs.factor=2"
OWN_FACTOR = "+custom_reward_function.reward_kwargs.factor=2"
BATCH = "reward_model.reward_manager=batch"


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path / "functions.py"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fine", []), ("any_keywords", [FACTOR]), ("with_more", [FACTOR]), ("decorated", []),
        ("with_more", [OWN_FACTOR]), ("built_in", [BATCH]), ("built_in", []),
        ("of_batches", [BATCH]), ("any_keywords", [BATCH, FACTOR]),
    ],
)  # fmt: skip
def test_functions_that_take_their_arguments(
    tokenizer: PreTrainedTokenizerFast, functions: Path, name: str, more: list[str]
) -> None:
    where = f"custom_reward_function.path={functions}"
    config = load(where, f"custom_reward_function.name={name}", *more)
    load_reward_manager(config, tokenizer, 0)


@pytest.mark.parametrize(
    ("name", "more", "signature", "keywords", "reason"),
    [
        ("other_names", [], "(answer, truth)", "", "missing a required argument: 'answer'"),
        ("three", [], "(data_source, solution_str, ground_truth)", "", "'extra_info'"),
        ("by_place", [], "extra_info=None, /)", "", "'data_source'"),
        ("with_more", [], "raw_prompt, factor)", ", raw_prompt", "'factor'"),
        ("fine", [FACTOR], "extra_info=None)", ", factor", "'factor'"),
        ("fine", [OWN_FACTOR], "extra_info=None)", ", factor", "'factor'"),
        ("of_batches", [], "(data_sources, ", "", "'data_sources'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_its_signature(
    tokenizer: PreTrainedTokenizerFast, functions: Path,
    name: str, more: list[str], signature: str, keywords: str, reason: str,
) -> None:  # fmt: skip
    where = f"custom_reward_function.path={functions}"
    config = load(where, f"custom_reward_function.name={name}", *more)
    with pytest.raises(ConfigError) as caught:
        load_reward_manager(config, tokenizer, 0)
    told = str(caught.value)
    assert told.startswith(f"custom_reward_function.name='{name}': {functions} has {name}(")
    assert signature in told.partition(", which cannot be called with ")[0]
    called = f"the keywords data_source, solution_str, ground_truth, extra_info{keywords}: "
    assert called in told and reason in told.partition(called)[2]


def test_a_function_of_batches_has_names_of_its_own(
    tokenizer: PreTrainedTokenizerFast, functions: Path
) -> None:
    where = f"custom_reward_function.path={functions}"
    config = load(where, "custom_reward_function.name=fine", BATCH)
    told = r"fine\(.*\), which .* data_sources, solution_strs, ground_truths, extra_infos: "
    with pytest.raises(ConfigError, match=told):
        load_reward_manager(config, tokenizer, 0)


def test_a_manager_of_ones_own_may_call_its_function_as_it_likes(
    tokenizer: PreTrainedTokenizerFast, functions: Path, managers: Path
) -> None:
    config = load(
        f"custom_reward_function.path={functions}", "custom_reward_function.name=other_names",
        "reward_manager.source=importlib", f"reward_manager.module.path={managers}",
        "reward_manager.module.name=Doubled",
    )  # fmt: skip
    load_reward_manager(config, tokenizer, 0)


@pytest.mark.parametrize("manager_name", ["naive", "dapo", "limited", "batch"])
def test_the_keywords_that_are_checked_are_those_of_the_calls(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, tmp_path: Path, manager_name: str
) -> None:
    (tmp_path / "calls.py").write_text(
        "def compute_score(raw_prompt=None, **call):\n"
        "    names = sorted(call) + ['raw_prompt'] * (raw_prompt is not None)\n"
        "    one = {'score': 1, 'names': sorted(names)}\n"
        "    return [one] if 'data_sources' in call else one\n"
    )
    config = load(
        f"custom_reward_function.path={tmp_path / 'calls.py'}", FACTOR,
        f"reward_model.reward_manager={manager_name}",
    )  # fmt: skip
    manager = load_reward_manager(config, tokenizer, 0)
    assert isinstance(manager, NaiveRewardManager)
    _, extra = compute_reward(make_data([("1=", "1", "1")]), manager)
    assert extra["names"] == [sorted(manager.keywords())]
