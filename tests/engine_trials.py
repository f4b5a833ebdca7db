"""What must hold of vLLM and of SGLang alike, with a real model. One engine serves all trials."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from caldera.config import RolloutConfig
from caldera.config.rollout import CheckpointEngineConfig
from caldera.demo import smollm2
from caldera.errors import RolloutError
from caldera.models.attention import ATTENTION
from caldera.rollout import ROLLOUTS, AsyncSampler, Completion, Request, SamplingParams
from caldera.rollout.engines.host.caldera_engine.buckets import ADAPTER_FILE
from caldera.rollout.engines.process import EngineProcess
from caldera.rollout.engines.rollout import EngineRollout
from caldera.rollout.engines.weights import ModuleWeights
from caldera.rollout.weights import probe_module
from caldera.trainer.main_ppo import main

if TYPE_CHECKING:
    from tests.conftest import Lab

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Hi!",
]
CPU = torch.device("cpu")
LENGTHS: dict[str, Any] = {"prompt_length": 128, "response_length": 64, "dtype": "float32"}
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
"""
"""Tells the answers to a prompt apart, whatever a model says."""


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
    def prompts(cls, tokenizer: Any) -> list[list[int]]:
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
        expected = native(model, greedy)
        assert_same(rollout.generate(greedy), expected)
        assert [each.finish_reason for each in expected[:2]] == ["stop", "length"]

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
        expected = native(model, [whole])[0].prompt_log_probs
        assert expected is not None
        count = len(prompts[0]) - 1
        assert sampled.prompt_log_probs == pytest.approx(expected[:count], abs=1e-2)
        first = native(model, [Request(prompts[0], params, 1)])[0].top_log_probs
        assert first is not None
        assert [v for _, v in sampled.top_log_probs[0]] == pytest.approx(
            [v for _, v in first[0]], abs=1e-2
        )

    def test_the_longest_requests(
        self, rollout: EngineRollout, model: torch.nn.Module, prompts: list[list[int]]
    ) -> None:
        """Of prompt and answer together as many tokens as there may be, and none less."""
        longest = LENGTHS["prompt_length"] + LENGTHS["response_length"]
        asked = [
            Request(
                (prompts[1] * longest)[: longest - new],
                SamplingParams(new, temperature=0.0, ignore_eos=True), 0,
            )
            for new in (1, 12)
        ]  # fmt: skip
        assert_same(rollout.generate(asked), native(model, asked))

    def test_tasks_stream_and_give_up(
        self, rollout: EngineRollout, greedy: list[Request], tokenizer: Any
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
        assert_same(rollout.generate(greedy), native(model, greedy), version=7)
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
        assert_same(rollout.generate(greedy[:1]), native(model, greedy[:1]), version=9)

    def test_it_sleeps_and_wakes_up(
        self, rollout: EngineRollout, model: torch.nn.Module, greedy: list[Request]
    ) -> None:
        rollout.sleep()
        with pytest.raises(RolloutError, match="sleeps"):
            rollout.generate(greedy)
        rollout.wake_up("weights")
        rollout.wake_up("kv_cache")
        assert_same(rollout.generate(greedy[:1]), native(model, greedy[:1]))

    def test_a_killed_engine_loses_nothing(
        self, rollout: EngineRollout, model: torch.nn.Module, greedy: list[Request]
    ) -> None:
        expected = native(model, greedy)
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


def native(model: torch.nn.Module, requests: list[Request]) -> list[Completion]:
    return ROLLOUTS["native"](RolloutConfig(**LENGTHS), model, CPU).generate(requests)


def _change(model: torch.nn.Module, seed: int) -> None:
    """Stands for training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.003)


# ---- adapters


class Order(NamedTuple):
    """What an engine was told to do."""

    what: str
    pid: int
    arguments: dict[str, Any]


def note_orders(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    """What engines are told to do from now on, other than to sample."""
    orders: list[Order] = []
    call = EngineProcess._call

    def noted(self: EngineProcess, what: str, **arguments: Any) -> Any:
        orders.append(Order(what, self.pid, arguments))
        return call(self, what, **arguments)

    monkeypatch.setattr(EngineProcess, "_call", noted)
    return orders


def change_adapter(model: torch.nn.Module, rollout: EngineRollout, version: int) -> None:
    """Another adapter, of the same model, as if it had been trained."""
    torch.manual_seed(version)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.normal_(std=0.4)
    rollout.update(ModuleWeights(model), version)
    rollout.expect(probe_module(model, CPU, 64))


def spoil_adapter(rollout: EngineRollout) -> None:
    """One bit of what is on its way to the engines is another."""
    adapters = rollout._weights._adapters
    assert adapters is not None and adapters.newest is not None
    file = Path(adapters.newest["path"]) / ADAPTER_FILE
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def small_model(lab: Lab, folder: Path) -> Path:
    """With heads of 32, which is the least that vLLM's kernels for CPUs take."""
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def assert_trains_on_two_ranks(lab: Lab, folder: Path, engine: str) -> None:
    """verl's layout: two trainer ranks share one engine, which has the weights of each step."""
    rows = lab.train(
        folder / "run",
        f"actor_rollout_ref.model.path={small_model(lab, folder / 'model')}",
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.rollout.engine_python={python_of(engine)}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
    )
    assert [row["training/global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-3
        assert row["actor/grad_norm"] > 0


def assert_trains_an_adapter(
    lab: Lab, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str, is_merged: bool = False
) -> None:
    """Each step of a run changes the adapter, and samples with what the step before made of it."""
    orders = note_orders(monkeypatch)
    (folder / "scorer.py").write_text(SCORER)
    arguments = lab.overrides(
        folder / "run",
        f"actor_rollout_ref.model.path={small_model(lab, folder / 'model')}",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=0.02",
        f"custom_reward_function.path={folder / 'scorer.py'}",
        "trainer.total_training_steps=3",
        *more,
    )
    assert main(arguments) == 0
    rows = lab.metrics(folder / "run")
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-5
    pushed = [each.arguments for each in orders if each.what == "use_weights"]
    versions = [each["version"] for each in pushed]
    assert len(set(versions)) == 3 and versions == sorted(versions)
    if is_merged:
        assert [each["adapter"] for each in pushed] == [None] * len(pushed)
    else:
        assert len({each["adapter"]["checksum"] for each in pushed}) == 3
        assert [each.what for each in orders].count("load_bucket") == 1
