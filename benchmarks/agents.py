"""Trajectories of several turns with slow tools, against the least that they can take.

    python benchmarks/agents.py [--trajectories 256] [--turns 4] [--tokens 24]

The demo's model samples every turn; after each but the last a tool takes a random 50 to 500 ms. No
schedule can be faster than the sampler is by itself, given the same tokens turn by turn without any
loop, nor than the trajectory whose tools take longest is alone: the larger of both is the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from caldera.agent_loop.base import AgentLoopBase, AgentLoopOutput, Equipment, register
from caldera.agent_loop.manager import AgentLoops
from caldera.agent_loop.output import COLUMN
from caldera.config import PPOTrainerConfig, load_config, resolve_for_machine
from caldera.data.turns import TurnAppender
from caldera.demo.arithmetic import build_model, build_tokenizer
from caldera.rollout import NativeRollout, Request, SamplingParams
from caldera.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from caldera.tools.formats import Hermes
from caldera.tools.parsing import FunctionCall
from caldera.tools.running import ToolRunner, ToolState

LEAST_SECONDS, MOST_SECONDS = 0.05, 0.5
PROMPT = "12+34"
TOOL_TOKENS = 8
SCHEMA = {"type": "function", "function": {"name": "wait", "description": "Takes its time."}}


class WaitingTool(BaseTool):
    """Answers after the seconds that the trajectory has for this turn."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        await asyncio.sleep(kwargs["agent_data"].memory["seconds"].pop(0))
        return ToolResponse("1" * TOOL_TOKENS), None, {}


@register("benchmark")
class Turns(AgentLoopBase):
    """As many turns as the row says, each of the same number of tokens."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        tools = self.equipment.tools
        assert tools is not None
        state = ToolState(memory={"seconds": list(row["seconds"])})
        prompt = await self.apply_chat_template(row["raw_prompt"])
        asked = {**sampling_params, "max_tokens": row["tokens"], "ignore_eos": True}
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        for turn in range(len(row["seconds"]) + 1):
            answer = await self.server_manager.generate("", prompt + ids, asked)
            ids += answer.token_ids
            log_probs += answer.log_probs
            mask += [1] * len(answer.token_ids)
            if turn < len(row["seconds"]):
                outcomes = await tools.run([FunctionCall("wait", "{}")], state)
                told = self.tokenizer.encode(outcomes[0].text, add_special_tokens=False)
                ids += told
                log_probs += [0.0] * len(told)
                mask += [0] * len(told)
        return AgentLoopOutput(prompt, ids, mask, log_probs, num_turns=2 * turn + 2)


def load(options: argparse.Namespace) -> PPOTrainerConfig:
    longest = options.turns * (options.tokens + TOOL_TOKENS)
    config = load_config(
        [
            "data.train_files=unused", "data.val_files=unused", "data.train_batch_size=1",
            "data.max_prompt_length=8", f"data.max_response_length={longest}",
            "actor_rollout_ref.model.path=unused",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
            f"actor_rollout_ref.rollout.max_num_seqs={options.trajectories}",
            "actor_rollout_ref.rollout.enable_prefix_caching=True",
            "actor_rollout_ref.rollout.agent.default_agent_loop=benchmark",
            "algorithm.adv_estimator=grpo",
        ]
    )  # fmt: skip
    resolve_for_machine(config, gpus=0)
    return config


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        config = load(options)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=0)
        model.config.max_position_embeddings = 8 + config.data.max_response_length
        self._rollout = NativeRollout(config.actor_rollout_ref.rollout, model, torch.device("cpu"))
        tool = WaitingTool({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        equipment = Equipment(TurnAppender(tokenizer), Hermes(tokenizer), ToolRunner([tool]))
        self._prompt = equipment.turns.prompt([{"role": "user", "content": PROMPT}])
        self._loops = AgentLoops(config, tokenizer, lambda *_: equipment)

    def sampling(self) -> float:
        """How long the sampler takes for the same tokens, in whole batches, without loops."""
        options = self._options
        params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
        prompts = [list(self._prompt) for _ in range(options.trajectories)]
        start = time.perf_counter()
        for _ in range(options.turns):
            requests = [Request(ids, params, seed) for seed, ids in enumerate(prompts)]
            for ids, sampled in zip(prompts, self._rollout.generate(requests), strict=True):
                ids += sampled.token_ids + [self._prompt[-1]] * TOOL_TOKENS
        return time.perf_counter() - start

    def seconds(self, waits: Sequence[Sequence[float]]) -> float:
        """How long the trajectories with these tools take, all at the same time."""
        rows = [
            {
                "raw_prompt": [{"role": "user", "content": PROMPT}],
                "tokens": self._options.tokens,
                "seconds": wait,
            }
            for wait in waits
        ]
        params = SamplingParams(max_tokens=self._options.tokens)
        start = time.perf_counter()
        batch = self._loops(rows, list(range(len(rows))), self._rollout, params, 0, None)
        took = time.perf_counter() - start
        turns = self._options.turns
        assert all(fact.num_turns == 2 * turns for fact in batch.non_tensor_batch[COLUMN])
        assert int(batch.batch["response_mask"].sum()) == len(rows) * turns * self._options.tokens
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24, help="that each turn samples")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    draw = random.Random(0)
    waits = [
        [draw.uniform(LEAST_SECONDS, MOST_SECONDS) for _ in range(options.turns - 1)]
        for _ in range(options.trajectories)
    ]
    benchmark = Benchmark(options)
    benchmark.seconds([[0.0] * (options.turns - 1)] * options.trajectories)  # warm-up
    for _ in range(options.repetitions):
        sampling = benchmark.sampling()
        longest = benchmark.seconds([max(waits, key=sum)])
        took = benchmark.seconds(waits)
        one_by_one = sum(map(sum, waits))
        print(
            f"{options.trajectories} trajectories of {options.turns} turns: {took:.2f} s; sampling "
            f"alone {sampling:.2f} s, the longest by itself {longest:.2f} s: "
            f"{took / max(sampling, longest):.2f} times the bound (tools one by one: "
            f"{one_by_one:.0f} s)"
        )


if __name__ == "__main__":
    main()
