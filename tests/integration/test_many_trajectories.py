"""Thousands of trajectories at the same time, on the native sampler with the demo's model."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
import torch

from caldera.agent_loop.base import AGENT_LOOPS, AgentLoopBase, AgentLoopOutput, Equipment
from caldera.agent_loop.manager import AgentLoops
from caldera.agent_loop.output import COLUMN
from caldera.config import load_config, resolve_for_machine
from caldera.data.chat import TurnAppender
from caldera.demo.arithmetic import build_model, build_tokenizer
from caldera.protocol import tensors_of
from caldera.rollout import NativeRollout, SamplingParams
from caldera.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from caldera.tools.formats import FunctionCall, Hermes
from caldera.tools.running import ToolRunner, ToolState

COUNT, TURNS, TOKENS = 2048, 3, 4
ROWS = 512
"""Sequences that the sampler runs at a time; the others wait for a place."""
SCHEMA = {"type": "function", "function": {"name": "meet"}}
LAST = "the last"


class Meeting(BaseTool):
    """The first call of each trajectory returns when all have called; that of the last one, only
    when all others have ended."""

    def __init__(self) -> None:
        super().__init__({"timeout": 120}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self.all_are_here = asyncio.Event()
        self.all_others_ended = asyncio.Event()
        self.here = self.ended = self.threads = self.files = 0

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        state: ToolState = kwargs["agent_data"]
        if "met" not in state.memory:
            state.memory["met"] = True
            self.here += 1
            if self.here == COUNT:
                self.threads = threading.active_count()
                self.files = len(os.listdir("/proc/self/fd"))
                self.all_are_here.set()
            await self.all_are_here.wait()
            if state.request_id == LAST:
                await self.all_others_ended.wait()
        return ToolResponse("12"), 0.5, {}

    def end(self) -> None:
        self.ended += 1
        if self.ended == COUNT - 1:
            self.all_others_ended.set()


class Calling(AgentLoopBase):
    """Samples a few tokens and calls the tool, turn after turn."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        tools = self.equipment.tools
        assert tools is not None
        state = ToolState(request_id=row["name"])
        prompt = await self.apply_chat_template(row["raw_prompt"])
        asked = {**sampling_params, "max_tokens": TOKENS, "ignore_eos": True}
        output = AgentLoopOutput(prompt, [], [], [], num_turns=2 * TURNS)
        for turn in range(TURNS):
            answer = await self.server_manager.generate("", prompt + output.response_ids, asked)
            told: list[int] = []
            if turn < TURNS - 1:
                (outcome,) = await tools.run([FunctionCall("meet", "{}")], state)
                key = f"meet/{outcome.status}"
                output.tool_calls[key] = output.tool_calls.get(key, 0) + 1
                told = self.tokenizer.encode(outcome.text, add_special_tokens=False)
            output.response_ids += answer.token_ids + told
            output.response_mask += [1] * TOKENS + [0] * len(told)
            assert output.response_logprobs is not None
            output.response_logprobs += answer.log_probs + [0.0] * len(told)
        tools.tools["meet"].end()  # type: ignore[attr-defined]
        return output


def test_none_of_two_thousand_trajectories_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AGENT_LOOPS, "_items", {**AGENT_LOOPS._items, "calling": Calling})
    config = load_config(
        [
            "data.train_files=unused", "data.val_files=unused", "data.train_batch_size=1",
            "data.max_prompt_length=8", "data.max_response_length=24",
            "actor_rollout_ref.model.path=unused",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
            f"actor_rollout_ref.rollout.max_num_seqs={ROWS}",
            "actor_rollout_ref.rollout.enable_prefix_caching=True",
            "actor_rollout_ref.rollout.enable_chunked_prefill=True",
            "actor_rollout_ref.rollout.agent.default_agent_loop=calling",
            "algorithm.adv_estimator=grpo",
        ]
    )  # fmt: skip
    resolve_for_machine(config, gpus=0)
    tokenizer = build_tokenizer()
    tool = Meeting()
    equipment = Equipment(TurnAppender(tokenizer), Hermes(tokenizer), ToolRunner([tool]))
    rollout = NativeRollout(
        config.actor_rollout_ref.rollout, build_model(tokenizer, seed=0), torch.device("cpu")
    )
    rows = [
        {"raw_prompt": [{"role": "user", "content": "12+34"}], "uid": f"{n}", "name": f"{n}"}
        for n in range(COUNT - 1)
    ]
    rows.insert(COUNT // 2, {**rows[0], "uid": LAST, "name": LAST})
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    loops = AgentLoops(config, tokenizer, lambda *_: equipment)
    params = SamplingParams(max_tokens=TOKENS)
    batch = loops(rows, list(range(COUNT)), rollout, params, tokenizer.pad_token_id, None)

    assert tool.here == COUNT, "all were in the tool at the same time"
    assert tool.threads - threads < 8 and tool.files - files < 32, "none costs a thread or a file"
    facts = batch.non_tensor_batch[COLUMN]
    assert {tuple(fact.tool_calls.items()) for fact in facts} == {(("meet/ok", TURNS - 1),)}
    tensors = tensors_of(batch)
    assert (tensors["response_mask"].sum(-1) == TURNS * TOKENS).all()
    told = tensors["responses"][:, TOKENS : TOKENS + 2]
    assert tokenizer.decode(told[0]) == "12" and (told == told[0]).all()
    assert (tensors["rollout_log_probs"][tensors["response_mask"] == 0] == 0).all()
    assert len({tuple(row) for row in tensors["responses"].tolist()}) > COUNT // 2
    assert not rollout.has_work()
