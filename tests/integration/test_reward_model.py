"""A reward model in two processes says what transformers says of the same conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from caldera.config import load_config, resolve_for_machine
from caldera.config.reward import RewardModelConfig
from caldera.demo.arithmetic import build_tokenizer
from caldera.protocol import DataProto
from caldera.reward.model_server import RewardModelClient
from caldera.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, WorkerGroup
from caldera.workers import RewardModelWorker
from caldera.workers.reward_router import Router
from tests.reward_models import plain_scores, save_reward_model

ANSWERS = ["7", "12+3", "", "1+1=2", "9", "42"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_reward_model(tmp_path_factory.mktemp("reward_model"))
    build_tokenizer().save_pretrained(folder / "actor")
    return folder


def settings(folder: Path, *overrides: str) -> RewardModelConfig:
    config = load_config(
        [
            "data.train_files=unused", "data.val_files=unused",
            f"actor_rollout_ref.model.path={folder / 'actor'}",
            "reward_model.enable=True", f"reward_model.model.path={folder}",
            "reward_model.micro_batch_size_per_gpu=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
            "critic.ppo_micro_batch_size_per_gpu=1",
            *overrides,
        ]
    )  # fmt: skip
    resolve_for_machine(config, gpus=0)
    return config.reward_model


def group_of(config: RewardModelConfig, ranks: int) -> WorkerGroup:
    group = LocalWorkerGroup(
        ResourcePool((ranks,)), ClassWithInitArgs(RewardModelWorker, config, "cpu")
    )
    group.init_model()
    return group


@pytest.fixture(scope="module", params=["local", "fsdp2"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[WorkerGroup]:
    group = group_of(settings(folder, f"reward_model.strategy={request.param}"), ranks=2)
    yield group
    group.shutdown()


def answered(folder: Path) -> tuple[DataProto, list[list[dict[str, str]]]]:
    """Answers in the actor's tokens, each with an end token; and the conversations."""
    actors = build_tokenizer()
    chats = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(len(ANSWERS))]
    ids = [list(actors.encode(text, add_special_tokens=False)) for text in ANSWERS]
    rows = [[*tokens, actors.eos_token_id] for tokens in ids]
    rows[2] = []
    responses = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
    valid = torch.tensor([[1] * len(row) + [0] * (8 - len(row)) for row in rows])
    prompts = torch.full((len(rows), 1), actors.bos_token_id)
    data = DataProto.from_dict(
        {
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": torch.cat([torch.ones_like(prompts), valid], 1),
            "responses": responses,
        },
        {"raw_prompt": chats},
    )
    said: list[Any] = [actors.decode(row, skip_special_tokens=True) for row in rows]
    talks = [
        [*chat, {"role": "assistant", "content": text}]
        for chat, text in zip(chats, said, strict=True)
    ]
    return data, talks


def test_two_ranks_score_what_transformers_scores(pair: WorkerGroup, folder: Path) -> None:
    data, talks = answered(folder)
    scores = pair.compute_rm_score(data).batch["rm_scores"].sum(1)
    expected = torch.tensor(plain_scores(folder, talks))
    expected[2] = 0
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_two_ranks_serve_behind_a_router(folder: Path) -> None:
    config = settings(folder, "reward_model.rollout.name=native")
    group = group_of(config, ranks=2)
    router = Router("127.0.0.1")
    try:
        addresses = group.serve()
        assert len(set(addresses)) == 2
        router.use(addresses)
        _, talks = answered(folder)
        client = client_of(folder, router)
        group.wake()
        scores = asyncio.run(all_scores(client, talks * 4))
        assert scores == pytest.approx(plain_scores(folder, talks) * 4, abs=1e-5)
        group.sleep()
        group.wake()
        assert asyncio.run(all_scores(client, talks))[0] == pytest.approx(scores[0], abs=1e-6)
    finally:
        router.close()
        group.stop_serving()
        group.shutdown()


def client_of(folder: Path, router: Router) -> RewardModelClient:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return RewardModelClient(f"http://{router.address}", "native", "judge", tokenizer)


async def all_scores(client: RewardModelClient, talks: list[list[dict[str, str]]]) -> list[float]:
    pending = (client.score(talk[:-1], talk[-1]["content"]) for talk in talks)
    return await asyncio.gather(*pending)
