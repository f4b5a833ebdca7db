"""A tokenizer with a chat template for tools, and loops on what a script samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from caldera.agent_loop.base import AgentLoopOutput, RunConfig
from caldera.agent_loop.manager import find_loop
from caldera.config import PPOTrainerConfig, load_config, resolve_for_machine
from caldera.interactions.base import BaseInteraction
from tests.unit.agent_loop.agent_scripts import Run, Script, equipment

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|s|>", "<|u|>", "<|a|>", "<|t|>"]
LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% if tools %}<|s|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<eos>"
    "{% endif %}"
    "{% for message in messages %}<|{{ message.role[0] }}|>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and the roles by special tokens."""
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(SPECIAL + LETTERS)}, "<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def load() -> Callable[..., PPOTrainerConfig]:
    def make(*overrides: str) -> PPOTrainerConfig:
        config = load_config(
            [
                "data.train_files=unused", "data.val_files=unused", "data.train_batch_size=1",
                "data.max_prompt_length=64", "data.max_response_length=256",
                "actor_rollout_ref.model.path=unused",
                "actor_rollout_ref.actor.ppo_mini_batch_size=1",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
                "algorithm.adv_estimator=grpo",
                *overrides,
            ]
        )  # fmt: skip
        resolve_for_machine(config, gpus=0)
        return config

    return make


@pytest.fixture
def run(tokenizer: PreTrainedTokenizerFast, load: Callable[..., PPOTrainerConfig]) -> Run:
    """The trajectory of a row, in which the policy says these texts."""

    def run_one(
        *texts: str, overrides: Sequence[str] = (), loop: str = "tool_agent",
        interactions: Mapping[str, BaseInteraction] | None = None, **row: Any,
    ) -> tuple[AgentLoopOutput, Script]:  # fmt: skip
        script = Script(tokenizer, texts)
        setting = RunConfig(load(*overrides), equipment(tokenizer, interactions))
        fields = {"raw_prompt": [{"role": "user", "content": "20+22?"}], **row}

        async def go() -> AgentLoopOutput:
            made = find_loop(loop, {})(
                trainer_config=setting, server_manager=script, tokenizer=tokenizer
            )
            return await made.run({"temperature": 1.0}, **fields)

        return asyncio.run(go()), script

    return run_one


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a file, and returns its path."""

    def make(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return make
