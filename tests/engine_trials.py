"""What must hold of vLLM and of SGLang alike, with a real model. One engine serves all trials."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from caldera.config import RolloutConfig
from caldera.config.rollout import CheckpointEngineConfig
from caldera.demo import smollm2
from caldera.errors import RolloutError
from caldera.models.attention import ATTENTION
from caldera.rollout import ROLLOUTS, AsyncSampler, Completion, Request, SamplingParams
from caldera.rollout.engines.probe import probe_module
from caldera.rollout.engines.rollout import EngineRollout

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Hi!",
]
CPU = torch.device("cpu")
LENGTHS: dict[str, Any] = {"prompt_length": 128, "response_length": 64, "dtype": "float32"}


def python_of(engine: str) -> str:
    """The Python that has the engine, which `make` names."""
    variable = f"CALDERA_{engine.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python with {engine}: `make {engine}` makes one")
    return os.environ[variable]


class EngineTrials:
    """To be subclassed, with the engine's name."""

    name: str

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls) -> Path:
        return smollm2.materialise()

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, folder: Path) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION
        )

    @pytest.fixture(scope="class")
    @classmethod
    def rollout(cls, model: torch.nn.Module) -> Iterator[EngineRollout]:
        config = RolloutConfig(
            name=cls.name, engine_python=python_of(cls.name), max_num_seqs=16,
            enable_prefix_caching=True, **LENGTHS,
            checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=64),
        )  # fmt: skip
        rollout = ROLLOUTS[cls.name](config, model, CPU)
        assert isinstance(rollout, EngineRollout)
        yield rollout
        rollout.close()

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in QUESTIONS
        ]

    @pytest.fixture
    def greedy(self, prompts: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[Request]:
        stops = frozenset({tokenizer.eos_token_id})
        params = SamplingParams(24, temperature=0.0, stop_token_ids=stops)
        return [Request(prompt, params, seed) for seed, prompt in enumerate(prompts)]

    def test_greedy_is_that_of_the_native_sampler(
        self, rollout: EngineRollout, model: torch.nn.Module, greedy: list[Request]
    ) -> None:
        native = _native(model, greedy)
        assert_same(rollout.generate(greedy), native)
        assert native[0].finish_reason == "stop" and native[1].finish_reason == "length"

    def test_samples_tell_what_they_were_asked_for(
        self, rollout: EngineRollout, model: torch.nn.Module, prompts: list[list[int]]
    ) -> None:
        """The native sampler, given what was sampled as a prompt, says the same of each token."""
        params = SamplingParams(6, temperature=0.7, logprobs=2, prompt_logprobs=True)
        sampled = rollout.generate([Request(prompts[0], params, 1)])[0]
        assert len(sampled.token_ids) == len(sampled.log_probs) == 6
        assert sampled.top_log_probs is not None and sampled.prompt_log_probs is not None
        assert [len(ranked) for ranked in sampled.top_log_probs] == [2] * 6
        whole = Request(
            [*prompts[0], *sampled.token_ids], SamplingParams(1, prompt_logprobs=True), 0
        )
        expected = _native(model, [whole])[0].prompt_log_probs
        assert expected is not None
        count = len(prompts[0]) - 1
        assert sampled.prompt_log_probs == pytest.approx(expected[:count], abs=1e-2)
        first = _native(model, [Request(prompts[0], params, 1)])[0].top_log_probs
        assert first is not None
        assert [v for _, v in sampled.top_log_probs[0]] == pytest.approx(
            [v for _, v in first[0]], abs=1e-2
        )

    def test_tasks_stream_and_give_up(
        self, rollout: EngineRollout, greedy: list[Request], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        rollout.decode = tokenizer.decode
        stopped = Request(greedy[0].prompt_ids, SamplingParams(24, 0.0, stop=("capital",)), 0)
        long = Request(greedy[1].prompt_ids, SamplingParams(64, 1.0, ignore_eos=True), 0)

        async def ask() -> tuple[list[int], Completion, Completion]:
            async with AsyncSampler(rollout) as sampler:
                waiting = asyncio.create_task(sampler.generate(long, name="long"))
                tokens, last = [], None
                async for piece in sampler.stream(stopped):
                    tokens += piece.token_ids
                    last = piece.completion
                assert last is not None
                await sampler.abort("long")
                return tokens, last, await waiting

        tokens, last, aborted = asyncio.run(ask())
        assert tokens == last.token_ids and last.finish_reason == "stop"
        assert tokenizer.decode(tokens).endswith("capital")
        assert aborted.finish_reason == "abort" and len(aborted.token_ids) < 64
        assert not rollout.has_work()

    def test_new_weights_and_what_is_left_of_old_ones(
        self, rollout: EngineRollout, model: torch.nn.Module, greedy: list[Request]
    ) -> None:
        """A request in flight goes on with them; an update costs no restart."""
        before = rollout.restarts
        finished: list[Completion] = []
        told: list[int] = []
        rollout.add(
            greedy[1],
            lambda _, token, __: told.append(token),
            lambda _, completion: finished.append(completion),
        )
        with rollout.stepping():
            while not told:
                rollout.step()
        _change(model, seed=1)
        rollout.load_weights(model.state_dict().items(), version=7)
        rollout.expect(probe_module(model, CPU, 64))
        assert_same(rollout.generate(greedy), _native(model, greedy), version=7)
        assert [version for version, _ in finished[0].weight_versions] == [0, 7]
        assert sum(count for _, count in finished[0].weight_versions) == 24
        assert rollout.restarts == before

    def test_other_weights_than_the_trainers_are_found_out(
        self, rollout: EngineRollout, model: torch.nn.Module, greedy: list[Request]
    ) -> None:
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        weights["model.layers.3.mlp.down_proj.weight"].zero_()
        rollout.load_weights(weights.items(), version=8)
        rollout.expect(probe_module(model, CPU, 64))
        with pytest.raises(RolloutError, match=r"log-probs of a probe .* No sample was drawn"):
            rollout.generate(greedy)
        assert not rollout.has_work()
        rollout.load_weights(model.state_dict().items(), version=9)
        rollout.expect(probe_module(model, CPU, 64))
        assert_same(rollout.generate(greedy[:1]), _native(model, greedy[:1]), version=9)

    def test_it_sleeps_and_wakes_up(
        self, rollout: EngineRollout, model: torch.nn.Module, greedy: list[Request]
    ) -> None:
        rollout.sleep()
        with pytest.raises(RolloutError, match="sleeps"):
            rollout.generate(greedy)
        rollout.wake_up("weights")
        rollout.wake_up("kv_cache")
        assert_same(rollout.generate(greedy[:1]), _native(model, greedy[:1]))

    def test_a_killed_engine_loses_nothing(
        self, rollout: EngineRollout, model: torch.nn.Module, greedy: list[Request]
    ) -> None:
        expected = _native(model, greedy)
        found: dict[int, Completion] = {}
        numbers = [rollout.add(each, None, found.__setitem__) for each in greedy]
        with rollout.stepping():
            for _ in range(4):
                rollout.step()
            os.kill(rollout.pids[0], signal.SIGKILL)
            while rollout.has_work():
                rollout.step()
        assert rollout.restarts == 1
        assert_same([found[number] for number in numbers], expected)


def assert_same(
    ours: list[Completion], theirs: list[Completion], version: int | None = None
) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert our.token_ids == their.token_ids
        assert our.finish_reason == their.finish_reason
        assert our.log_probs == pytest.approx(their.log_probs, abs=1e-2)
        assert version is None or set(our.token_versions()) == {version}


def _native(model: torch.nn.Module, requests: list[Request]) -> list[Completion]:
    return ROLLOUTS["native"](RolloutConfig(**LENGTHS), model, CPU).generate(requests)


def _change(model: torch.nn.Module, seed: int) -> None:
    """Stands for training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.003)
