"""A run whose model searches by verl's search tool, in a service of its own process."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from caldera.agent_loop.output import COLUMN
from caldera.config import load_config
from caldera.protocol import DataProto, tensors_of
from caldera.search_agent.retriever import BuildOptions, build_index
from caldera.tracking.dumps import read_jsonl
from caldera.trainer.groups import make_groups_for
from caldera.trainer.ppo.setup import TaskRunner, settle

pytest.importorskip("bm25s")

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|tool|>", "<|assistant|>"]
OPENING = '<tool_call>{"name": "search", "arguments": {"query_list": ["'
CLOSING = '"]}}</tool_call>'
PEOPLE = [f"person{number}" for number in range(10, 26)]
CITIES = [f"city{number}" for number in range(10, 14)]
HOMES = {person: random.Random(person).choice(CITIES) for person in PEOPLE}
STEPS = 3
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role != 'user' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each name, tag and end of a tool call."""
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    tokens = {token: place for place, token in enumerate(SPECIAL + letters)}
    backend = Tokenizer(models.WordLevel(tokens, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    tokenizer.add_tokens([OPENING, CLOSING, "<answer>", "</answer>", *PEOPLE, *CITIES])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A model that searches for somebody, and then answers with some city."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=160,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = random.Random(1)
    for _ in range(150):
        rows = []
        for _ in range(16):
            person, city = draw.choice(PEOPLE), draw.choice(CITIES)
            told = json.dumps({"result": f"Doc 1 (Title: {person})\n{person} lives in {city}"})
            rows.append(
                f"<|user|>{person}<|assistant|>{OPENING}{person}{CLOSING}<eos>"
                f"<|tool|>{told}<eos><|assistant|><answer>{city}</answer><eos>"
            )
        ids = tokenizer(rows, add_special_tokens=False, padding=True, return_tensors="pt").input_ids
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=0
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of model, questions and index."""
    folder = tmp_path_factory.mktemp("search")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    save_model(tokenizer, folder / "model")
    rows = [
        {
            "data_source": "searchR1_nq",
            "prompt": [{"role": "user", "content": person}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [HOMES[person]]}},
            "agent_name": "tool_agent",
            "extra_info": {
                "index": number,
                "need_tools_kwargs": True,
                "tools_kwargs": {"search": {"create_kwargs": {"question": person}}},
            },
        }
        for number, person in enumerate(PEOPLE)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    with (folder / "corpus.jsonl").open("w") as corpus:
        for person in PEOPLE:
            contents = f'"{person}"\n{person} lives in {HOMES[person]}'
            corpus.write(json.dumps({"id": person, "contents": contents}) + "\n")
    build_index([folder / "corpus.jsonl"], folder / "index", BuildOptions())
    return folder


@pytest.fixture
def tools(task: Path) -> Iterator[Path]:
    """The file of a search tool whose service runs."""
    command = [sys.executable, "-m", "caldera.cli", "retriever", "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "--index", str(task / "index")], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            match = re.match(r"(http://\S+/retrieve): ", process.stdout.readline())
            assert match, "the service did not start"
            config = {"type": "native", "retrieval_service_url": match[1], "topk": 1}
            entry = {"class_name": "verl.tools.search_tool.SearchTool", "config": config}
            (task / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
            yield task / "tools.yaml"
        finally:
            process.kill()


def overrides(task: Path, tools: Path, run_dir: Path) -> list[str]:
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    return [
        f"data.train_files={task / 'train.parquet'}",
        f"data.val_files={task / 'train.parquet'}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=128",
        f"actor_rollout_ref.model.path={task / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.rollout.n=4",
        f"{multi_turn}.enable=True",
        f"{multi_turn}.tool_config_path={tools}",
        f"{multi_turn}.max_assistant_turns=2",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={run_dir}",
    ]


def check_masks(batch: DataProto, tokenizer: Any) -> int:
    """What the service found, in the tool's form, is exactly what nothing is learned from. Returns
    how many searches found somebody."""
    tensors = tensors_of(batch)
    width = tensors["prompts"].shape[-1]
    searches = 0
    for row, fact in enumerate(batch.non_tensor_batch[COLUMN]):
        length = int(tensors["attention_mask"][row, width:].sum())
        ids, mask = tensors["responses"][row, :length], tensors["response_mask"][row].bool()
        told = tokenizer.decode(ids[~mask[:length]])
        if fact.tool_calls == {"search/ok": 1} and told:
            answered = re.fullmatch(r"(?:<eos>)?<\|tool\|>(.*)<eos><\|assistant\|>", told)
            assert answered, told
            asked = re.search(re.escape(OPENING) + "(.*?)" + re.escape(CLOSING),
                              tokenizer.decode(ids[mask[:length]]))  # fmt: skip
            assert asked
            found = json.loads(answered[1])["result"]
            if (person := asked[1]) in HOMES:  # it may ask for several at once
                searches += 1
                assert found == f"Doc 1 (Title: {person})\n{person} lives in {HOMES[person]}"
        assert not mask[length:].any()
        for key in ("advantages", "rollout_log_probs"):
            assert (tensors[key][row][~mask] == 0).all(), key
        ours, theirs = (tensors[key][row][mask] for key in ("old_log_probs", "rollout_log_probs"))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    return searches


@pytest.mark.slow
def test_a_run_searches_by_the_tool(task: Path, tools: Path, tmp_path: Path) -> None:
    config = load_config(overrides(task, tools, tmp_path))
    settle(config, 0)
    trainer = TaskRunner(make_groups_for(config)).build(config)
    searches: list[int] = []
    update = trainer.update

    def watched(batch: DataProto, *rest: Any, **named: Any) -> None:
        searches.append(check_masks(batch, trainer.tokenizer))
        update(batch, *rest, **named)

    trainer.update = watched  # type: ignore[method-assign]
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    assert len(searches) == STEPS and min(searches) > 16, "of 32 trajectories"
    rows = [line["data"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    called = [row["tool_calls/search/ok"] for row in rows if "tool_calls/search/ok" in row]
    assert len(called) == STEPS
    assert all(many >= few for many, few in zip(called, searches, strict=True))
