"""What the agent loops of a run lack is told when it starts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset

from caldera.config import PPOTrainerConfig
from caldera.demo.arithmetic import build_tokenizer
from caldera.errors import ConfigError, DataError
from caldera.trainer.ppo.agents import data_with_tools, make_agents
from tests.template_tokenizers import real

TOKENIZER = build_tokenizer()


def config(default: str = "single_turn_agent") -> PPOTrainerConfig:
    made = PPOTrainerConfig()
    made.actor_rollout_ref.rollout.agent.default_agent_loop = default
    made.data.return_raw_chat = True
    made.actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode = "disable"
    return made


def rows(*agent_names: str | None) -> Any:
    """A data set whose rows ask for these loops."""
    return SimpleNamespace(column_values=lambda column: agent_names)


class OwnRows(Dataset[Any]):
    """A data set of the user's own, which chooses the loop itself."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"agent_name": "search_agent"}


ASKED = pytest.mark.parametrize("by_row", [True, False])


def start(loop: str, by_row: bool, url: str | None = None) -> Any:
    made = config() if by_row else config(loop)
    made.retriever.url = url
    return make_agents(made, TOKENIZER, [rows(None, loop)] if by_row else [rows(None)])


@ASKED
def test_the_search_agent_needs_a_retriever(by_row: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"^retriever\.url=null: the agent loop search_agent .*http"
    ):
        start("search_agent", by_row)
    with pytest.raises(ConfigError, match=r"^retriever\.url='localhost' must be the address"):
        start("search_agent", by_row, url="localhost")
    assert start("search_agent", by_row, url="http://127.0.0.1:8000/retrieve") is not None


@ASKED
def test_the_loop_of_langgraph_needs_it(by_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langgraph.graph", None)
    monkeypatch.delitem(sys.modules, "caldera.agent_loop.react_graph", raising=False)
    with pytest.raises(
        ConfigError, match=r"react_agent .*default_agent_loop.*pip install .*\[langgraph\]'$"
    ):
        start("react_agent", by_row)


def test_agents_need_a_chat_template() -> None:
    made = config("tool_agent")
    made.data.apply_chat_template = False
    with pytest.raises(ConfigError, match=r"^data\.apply_chat_template=False: agent loops render"):
        make_agents(made, TOKENIZER, [rows(None)])
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match=r"has no chat template"):
        make_agents(config("tool_agent"), bare, [rows(None)])


def test_a_data_set_of_ones_own_may_choose_the_loop() -> None:
    with pytest.raises(ConfigError, match=r"^retriever\.url=null: the agent loop search_agent"):
        make_agents(config(), TOKENIZER, [OwnRows()])


def test_a_loop_that_no_row_asks_for_needs_nothing() -> None:
    assert make_agents(config(), TOKENIZER, [rows(None)]) is None


TOOLS = """
from caldera.tools import function_tool


@function_tool
def add(a: int, b: int) -> str:
    \"""Add numbers.

    Args:
        a: one
        b: another
    \"""
    return str(a + b)
"""


@pytest.mark.parametrize(
    ("template", "mode", "warns"),
    [("smollm2", "strict", True), ("smollm2", "disable", False), ("qwen3", "strict", False)],
)
def test_tools_that_the_chat_template_leaves_out_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, mode: str, warns: bool
) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    made = config("tool_agent")
    made.actor_rollout_ref.rollout.multi_turn.function_tool_path = str(file)
    made.actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode = mode
    with caplog.at_level(logging.WARNING):
        data = data_with_tools(made, real(template))
    assert data.apply_chat_template_kwargs["tools"][0]["function"]["name"] == "add"
    told = [message for message in caplog.messages if "leaves out the tools (add)" in message]
    assert len(told) == warns
    assert all("actor_rollout_ref.model.custom_chat_template" in message for message in told)
