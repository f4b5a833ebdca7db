"""A small model learns to search before it answers, in a run of the real trainer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from caldera.config import load_config
from caldera.protocol import DataProto, tensors_of
from caldera.search_agent.loop import documents_text, observation
from caldera.search_agent.retriever import BuildOptions, Index, RetrieverServer, build_index
from caldera.tools.search import Document
from caldera.trainer.groups import make_groups_for
from caldera.trainer.ppo.setup import TaskRunner, settle

pytest.importorskip("bm25s")

PEOPLE = [f"person{number}" for number in range(48)]
CITIES = [f"city{number}" for number in range(10)]
HOMES = {person: random.Random(person).choice(CITIES) for person in PEOPLE}
"""What the corpus says, and nobody else."""
TAGS = [f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/")]
WORDS = ["Doc", "1", "(", "Title", ":", ")", " ", "\n", "lives", "in", "No", *PEOPLE, *CITIES]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
SEARCHING = 0.2
"""Answers of the warm-started model that search first; the others guess."""
READS = 0.01
"""Loss below which it can search and read; then it is taught to guess, in so many lessons:"""
GUESSES = 100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word or tag."""
    tokens = ["<pad>", "<bos>", "<eos>", *TAGS, *WORDS]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?\w+>|\w+|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def told(person: str, city: str) -> str:
    documents = [Document(person, f"{person} lives in {city}")]
    return observation(documents_text(documents), "<information>", "</information>")


def save_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A model that can search and read, and mostly guesses. It has not seen who lives where."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(1)
    for _ in range(1000):
        if _learn(model, optimizer, *_lessons(tokenizer, draw, 1.0)) < READS:
            break
    else:
        raise AssertionError("the warm start does not learn to read")
    for _ in range(GUESSES):
        _learn(model, optimizer, *_lessons(tokenizer, draw, SEARCHING))
    model.save_pretrained(folder)


def _learn(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    asked: torch.Tensor,
) -> float:
    """One step; returns the loss of before."""
    log_probs = model(ids).logits[:, :-1].log_softmax(-1)  # (B, T - 1, V)
    chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1) * asked
    loss = -chosen.sum() / asked.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _lessons(
    tokenizer: Any, draw: random.Random, searching: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trajectories (B, T), and which of their next tokens are the policy's (B, T - 1)."""
    rows, masks = [], []
    for _ in range(64):
        person, city = draw.choice(PEOPLE), draw.choice(CITIES)
        parts = [(f"<bos>{person}:", 0)]
        if draw.random() < searching:
            parts += [(f"<search>{person}</search>", 1), (told(person, city), 0)]
        parts.append((f"<answer>{city}</answer>", 1))
        encoded = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in parts]
        rows.append([token for ids, _ in encoded for token in ids])
        masks.append([own for ids, own in encoded for _ in ids])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([row + [0] * (width - len(row)) for row in masks])
    return ids, mask[:, 1:]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of model, questions and index."""
    folder = tmp_path_factory.mktemp("search")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    save_model(tokenizer, folder / "model")
    for split, people in (("train", PEOPLE[:32]), ("test", PEOPLE[32:])):
        rows = [
            {
                "data_source": "searchR1_nq",
                "prompt": [{"role": "user", "content": person}],
                "reward_model": {"style": "rule", "ground_truth": {"target": [HOMES[person]]}},
            }
            for person in people
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    passages = [
        {"id": person, "contents": f'"{person}"\n{person} lives in {HOMES[person]}'}
        for person in PEOPLE
    ]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    build_index([corpus], folder / "index", BuildOptions())
    return folder


@pytest.fixture
def url(task: Path) -> Iterator[str]:
    with RetrieverServer(Index(task / "index"), "127.0.0.1", 0) as server:
        yield server.url


def overrides(task: Path, url: str, run_dir: Path) -> list[str]:
    return [
        f"data.train_files={task / 'train.parquet'}",
        f"data.val_files={task / 'test.parquet'}",
        "data.train_batch_size=16",
        "data.max_start_length=4",
        "data.max_response_length=6",
        "data.max_obs_length=30",
        "do_search=true",
        "max_turns=1",
        f"retriever.url={url}",
        "retriever.topk=1",
        "actor_rollout_ref.actor.state_masking=true",
        f"actor_rollout_ref.model.path={task / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.n_agent=8",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.total_training_steps=22",
        "trainer.test_freq=22",
        f"trainer.default_local_dir={run_dir}",
    ]


def check_masks(batch: DataProto, tokenizer: Any) -> None:
    """What a search brought is exactly what no loss, advantage or log-prob belongs to."""
    tensors = tensors_of(batch)
    width = tensors["prompts"].shape[-1]
    for row, searches in enumerate(batch.non_tensor_batch["search_valid_searches"]):
        length = int(tensors["attention_mask"][row, width:].sum())
        ids, mask = tensors["responses"][row, :length], tensors["response_mask"][row].bool()
        others = tokenizer.decode(ids[~mask[:length]])
        if searches:
            assert re.fullmatch(r"\n\n<information>(Doc 1.*\n|No .*)</information>\n\n", others), (
                others
            )
            assert "</search>" in tokenizer.decode(ids).partition(others)[0]
        else:
            assert "<information>" not in others
        assert not mask[length:].any()
        for key in ("advantages", "rollout_log_probs"):
            assert (tensors[key][row][~mask] == 0).all(), key
        ours, theirs = (tensors[key][row][mask] for key in ("old_log_probs", "rollout_log_probs"))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_a_model_learns_to_search_before_it_answers(task: Path, url: str, tmp_path: Path) -> None:
    config = load_config(overrides(task, url, tmp_path))
    settle(config, 0)
    trainer = TaskRunner(make_groups_for(config)).build(config)
    update = trainer.update

    def watched(batch: DataProto, *rest: Any, **named: Any) -> None:
        check_masks(batch, trainer.tokenizer)
        update(batch, *rest, **named)

    trainer.update = watched  # type: ignore[method-assign]
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [line["data"] for line in lines if "env/number_of_valid_search" in line["data"]]
    searches = [row["env/number_of_valid_search"] for row in rows]
    rewards = [row["critic/score/mean"] for row in rows]
    print([round(x, 2) for x in searches], [round(x, 2) for x in rewards])
    assert len(rows) == 22
    assert searches[0] < 0.4 and rewards[0] < 0.5
    assert sum(searches[-5:]) / 5 > 0.9 and sum(rewards[-5:]) / 5 > 0.8  # it was 0.98 and 0.92
    assert all(0 < row["state_tokens/coverage"] < 1 for row in rows[1:])
    accuracies = [
        line["data"][name]
        for line in lines
        for name in line["data"]
        if name.startswith("val-core/searchR1_nq/")
    ]
    print(accuracies)
    assert accuracies[-1] > 0.85, "people of whom it was never asked"
