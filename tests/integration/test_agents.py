"""Runs with agent loops: what is refused before they start, and what they do not depend on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

from caldera.config import PPOTrainerConfig, load_config, resolve_for_machine
from caldera.data import hf_tokenizer
from caldera.data.rl_dataset import RLHFDataset
from caldera.errors import CalderaError
from caldera.trainer.ppo.agents import data_with_tools, equip, make_agents

if TYPE_CHECKING:
    from tests.conftest import Lab

ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
TALK = """
interaction:
- name: examiner
  class_name: caldera.interactions.scripted.ScriptedInteraction
  config:
    turns:
    - {say: "1+1", expect: "^[0-9]{1,2}$", score: 0.5}
    - {say: "", expect: "2", score: 1.0}
"""
TOOLS = "tools: [{class_name: CalculatorTool, config: {type: native}}]"
FUNCTIONS = '''
from caldera.tools import function_tool

@function_tool
def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: what is doubled
    """
    return str(2 * number)
'''
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    turns = extra_info["turn_scores"]
    assert extra_info["num_turns"] == 2 * len(turns), extra_info
    return {"score": sum(turns), "turns": len(turns)}
"""
HOSTILE = (
    "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="session")
def files(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's rows with an interaction, and files of tools and interactions."""
    folder = tmp_path_factory.mktemp("agents")
    rows = pyarrow.parquet.read_table(lab.train_file).to_pylist()
    for row in rows:
        row["agent_name"] = "tool_agent"
        row["extra_info"]["interaction_kwargs"] = {"name": "examiner"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "talks.parquet")
    texts = {"talk.yaml": TALK, "tools.yaml": TOOLS, "functions.py": FUNCTIONS, "scorer.py": SCORER}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def talks(files: Path) -> list[str]:
    """The arguments of a run whose rows are talked to."""
    return [
        f"data.train_files={files / 'talks.parquet'}",
        f"data.val_files={files / 'talks.parquet'}",
        "data.max_response_length=12",
        f"{MULTI_TURN}.interaction_config_path={files / 'talk.yaml'}",
        f"custom_reward_function.path={files / 'scorer.py'}",
        f"{ROLLOUT}.n=4",
    ]


@pytest.mark.slow
def test_a_run_in_two_processes_is_the_run_in_one(lab: Lab, files: Path, tmp_path: Path) -> None:
    """Trajectories are scored as they end, with what the interaction said of their turns."""
    arguments = [
        *talks(files), *lab.descent, "trainer.total_training_steps=2",
        f"{MULTI_TURN}.turn_rewards=mixed",
    ]  # fmt: skip
    dumps = f"trainer.rollout_data_dir={tmp_path / 'dumps'}"
    validation = ("trainer.val_before_train=True", f"{ROLLOUT}.val_kwargs.n=2",
                  f"trainer.validation_data_dir={tmp_path / 'validation'}")  # fmt: skip
    first, *one = lab.train(tmp_path / "one", *arguments, dumps, *validation)
    two = lab.train(tmp_path / "two", *arguments, "trainer.n_gpus_per_node=2")
    lab.assert_same(two, one)
    for metric in ("num_turns/mean", "tool_call_counts/max"):
        assert [row[metric] for row in one] == [row[metric] for row in two]
    rows = [json.loads(line) for line in (tmp_path / "dumps/2.jsonl").read_text().splitlines()]
    assert len(rows) == 100
    assert first["val-aux/num_turns/mean"] == 4
    held_out = (tmp_path / "validation/0.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["timeline"]) for line in held_out] == [4] * 50
    for row in rows:
        # What the scorer says is the sum over turns, to which the turns' own come once more.
        assert row["score"] == pytest.approx(2 * sum(row["turn_scores"]))
        assert row["__num_turns__"] == 2 * len(row["turn_scores"])
        kinds = [event["kind"] for event in row["timeline"]]
        assert kinds == ["generate", "user"] * len(row["turn_scores"])
    assert {len(row["turn_scores"]) for row in rows} == {2}


# ---------------------------------------------------------------------- refused


@pytest.fixture
def load(lab: Lab, files: Path, tmp_path: Path) -> Callable[..., PPOTrainerConfig]:
    def make(*overrides: str) -> PPOTrainerConfig:
        config = load_config(lab.overrides(tmp_path, *overrides))
        resolve_for_machine(config, gpus=0)
        return config

    return make


def prepare(config: PPOTrainerConfig) -> Any:
    path = str(config.actor_rollout_ref.model.path)
    template = config.actor_rollout_ref.model.custom_chat_template
    tokenizer = hf_tokenizer(path, custom_chat_template=template)
    dataset = RLHFDataset(config.data.train_files, tokenizer, data_with_tools(config, tokenizer))
    return make_agents(config, tokenizer, [dataset])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{MULTI_TURN}.tool_config_path={{files}}/tools.yaml"], "no agent loop of this run"),
        ([f"{MULTI_TURN}.function_tool_path={{files}}/functions.py"], "no agent loop of this run"),
        ([f"{MULTI_TURN}.interaction_config_path={{files}}/talk.yaml"], "no agent loop of this"),
        ([f"{MULTI_TURN}.turn_rewards=turn"], "without agent loops there are no turns"),
        ([f"{MULTI_TURN}.enable=True", "data.return_raw_chat=False"], "need the prompts' messages"),
        ([f"{ROLLOUT}.agent.default_agent_loop=toll_agent"], "did you mean 'tool_agent'"),
        ([f"{MULTI_TURN}.max_parallel_calls=0"], "must be at least 1"),
        ([f"{MULTI_TURN}.tool_response_truncate_side=top"], "takes one of left, middle, right"),
        (
            [
                f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
                f"{MULTI_TURN}.tool_config_path={{files}}/tools.yaml",
                "actor_rollout_ref.model.custom_chat_template='" + HOSTILE + "'",
            ],
            "cannot have a turn of the role 'tool' appended",
        ),
    ],
)
def test_runs_that_cannot_be_are_refused(
    load: Any, files: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(CalderaError, match=message):
        prepare(load(*(text.replace("{files}", str(files)) for text in overrides)))


def test_one_turn_needs_no_loops(load: Any) -> None:
    assert prepare(load()) is None


def test_loops_are_made_for_rows_that_ask_for_them(load: Any, files: Path) -> None:
    assert prepare(load(*talks(files))) is not None
    assert prepare(load(f"{MULTI_TURN}.enable=True")) is not None


def test_all_is_shared_that_the_files_say(load: Any, files: Path) -> None:
    config = load(
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{MULTI_TURN}.tool_config_path={files}/tools.yaml",
        f"{MULTI_TURN}.function_tool_path={files}/functions.py",
        f"{MULTI_TURN}.interaction_config_path={files}/talk.yaml",
    )
    tokenizer = hf_tokenizer(str(config.actor_rollout_ref.model.path))
    shared = equip(config, tokenizer)
    assert shared.tools is not None
    assert list(shared.tools.tools) == ["calculator", "double"]
    assert list(shared.interactions) == ["examiner"]
    # Prompts are measured with the tools in them.
    shown = data_with_tools(config, tokenizer).apply_chat_template_kwargs["tools"]
    assert [tool["function"]["name"] for tool in shown] == ["calculator", "double"]
