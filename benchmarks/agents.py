"""Trajectories of several turns with slow tools, against the least that they can take.

    python benchmarks/agents.py [--trajectories 256] [--turns 4] [--tokens 24] [--whole-prompts]
    python benchmarks/agents.py --trajectories 2048 --tokens 8 --rounds 3

The demo's model samples every turn; after each but the last a tool takes a random 50 to 500 ms. No
schedule can be faster than the sampler is by itself, given the same tokens turn by turn without any
loop, nor than the trajectory whose tools take longest is alone: the larger of both is the bound.
Both are timed in every round, in turn, so that the machine's load is the same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from caldera.agent_loop.base import AgentLoopBase, AgentLoopOutput, Equipment, register
from caldera.agent_loop.manager import AgentLoops
from caldera.agent_loop.output import COLUMN
from caldera.config import PPOTrainerConfig, load_config, resolve_for_machine
from caldera.data.chat import TurnAppender
from caldera.demo.arithmetic import build_model, build_tokenizer
from caldera.protocol import tensors_of
from caldera.rollout import NativeRollout, Request, SamplingParams
from caldera.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from caldera.tools.formats import FunctionCall, Hermes
from caldera.tools.running import ToolRunner, ToolState

LEAST_SECONDS, MOST_SECONDS = 0.05, 0.5
MOST_ROWS = 1024
PROMPT = "12+34"
TOOL_TOKENS = 8
SCHEMA = {"type": "function", "function": {"name": "wait", "description": "Takes its time."}}


class WaitingTool(BaseTool):
    """Answers after the seconds that the trajectory has for this turn. Notes the largest figures
    that it sees: calls at the same time, seconds that the event loop is late, threads, files."""

    def __init__(self) -> None:
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self.calls = self.most_calls = self.most_threads = self.most_files = 0
        self.latest = 0.0

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        self.calls += 1
        if self.calls > self.most_calls:
            self.most_calls = self.calls
            self.most_threads = max(self.most_threads, threading.active_count())
            self.most_files = max(self.most_files, len(os.listdir("/proc/self/fd")))
        seconds = kwargs["agent_data"].memory["seconds"].pop(0)
        start = time.perf_counter()
        await asyncio.sleep(seconds)
        self.latest = max(self.latest, time.perf_counter() - start - seconds)
        self.calls -= 1
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
            "data.train_files=unused",
            "data.val_files=unused",
            "data.train_batch_size=1",
            "data.max_prompt_length=8",
            f"data.max_response_length={longest}",
            "actor_rollout_ref.model.path=unused",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
            f"actor_rollout_ref.rollout.max_num_seqs={min(options.trajectories, MOST_ROWS)}",
            f"actor_rollout_ref.rollout.enable_chunked_prefill={not options.whole_prompts}",
            "actor_rollout_ref.rollout.enable_prefix_caching=True",
            "actor_rollout_ref.rollout.agent.default_agent_loop=benchmark",
            "algorithm.adv_estimator=grpo",
        ]
    )
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
        self.tool = WaitingTool()
        equipment = Equipment(TurnAppender(tokenizer), Hermes(tokenizer), ToolRunner([self.tool]))
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
        assert (
            int(tensors_of(batch)["response_mask"].sum())
            == len(rows) * turns * self._options.tokens
        )
        return took


def round_of(benchmark: Benchmark, waits: Sequence[Sequence[float]], first: int) -> list[float]:
    """Seconds of (sampling alone, the longest by itself, all), begun with the one at `first`."""
    timed: list[Callable[[], float]] = [
        benchmark.sampling,
        partial(benchmark.seconds, [max(waits, key=sum)]),
        partial(benchmark.seconds, waits),
    ]
    took = [0.0] * len(timed)
    for place in range(len(timed)):
        chosen = (first + place) % len(timed)
        took[chosen] = timed[chosen]()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24, help="that each turn samples")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--whole-prompts",
        action="store_true",
        help="no enable_chunked_prefill: prompts that come back run whole beside the decoding",
    )
    options = parser.parse_args()
    draw = random.Random(0)
    waits = [
        [draw.uniform(LEAST_SECONDS, MOST_SECONDS) for _ in range(options.turns - 1)]
        for _ in range(options.trajectories)
    ]
    benchmark = Benchmark(options)
    benchmark.seconds([[0.0] * (options.turns - 1)] * options.trajectories)  # warm-up
    print(
        f"{options.trajectories} trajectories of {options.turns} turns of {options.tokens} tokens; "
        f"the tools one by one take {sum(map(sum, waits)):.0f} s"
    )
    ratios = []
    for number in range(options.rounds):
        sampling, longest, took = round_of(benchmark, waits, first=number)
        ratios.append(took / max(sampling, longest))
        print(
            f"{took:7.2f} s; sampling alone {sampling:.2f} s, the longest by itself "
            f"{longest:.2f} s: {ratios[-1]:.2f} times the bound (load {os.getloadavg()[0]:.1f})"
        )
    print(
        f"median {statistics.median(ratios):.2f} times the bound, from {min(ratios):.2f} to "
        f"{max(ratios):.2f} in {options.rounds} rounds"
    )
    tool, memory = benchmark.tool, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"at most {tool.most_calls} calls at a time, {tool.most_threads} threads, "
        f"{tool.most_files} open files, {memory:.0f} MiB; a tool came back at most "
        f"{tool.latest * 1e3:.0f} ms late"
    )


if __name__ == "__main__":
    main()
