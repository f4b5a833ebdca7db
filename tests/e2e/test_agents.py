"""A small model learns to call a tool, in a run of the real trainer."""

from __future__ import annotations

import random
import re
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
from caldera.tracking.dumps import read_jsonl
from caldera.trainer.groups import make_groups_for
from caldera.trainer.ppo.setup import TaskRunner, settle

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|tool|>", "<|assistant|>"]
OPENING = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CLOSING = '"}}</tool_call>'
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role != 'user' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STEPS = 10
CALLING = 0.25
"""Answers of the warm-started model that call the calculator; the others guess."""
SCORER = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info):
    found = re.search(r"=([0-9]+)$", solution_str)
    return float(found is not None and found.group(1) == ground_truth)
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a digit, and one for each end of a tool call."""
    tokens = [*SPECIAL, *"0123456789+="]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    tokenizer.add_tokens([OPENING, CLOSING])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def sums(count: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    return [(f"{a}+{b}", str(a + b)) for a, b in pairs]


def save_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A model that knows how to call and how to copy a result, and seldom calls."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(1)
    for step in range(700):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 20, (700 - step) / 200)
        ids, asked = _lessons(tokenizer, draw)
        log_probs = model(ids).logits[:, :-1].log_softmax(-1)  # (B, T - 1, V)
        chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1) * asked
        optimizer.zero_grad()
        (-chosen.sum() / asked.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)


def _lessons(tokenizer: Any, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Conversations (B, T), and which of their next tokens are the assistant's (B, T - 1)."""
    texts, starts = [], []
    for question, answer in sums(64, draw.randrange(10**9)):
        prompt = f"<|user|>{question}<|assistant|>"
        guess = f"={draw.randint(20, 198)}<eos>"
        call = f"{OPENING}{question}{CLOSING}<eos><|tool|>{answer}<eos><|assistant|>={answer}<eos>"
        texts.append(prompt + (call if draw.random() < CALLING else guess))
        starts.append(len(tokenizer.encode(prompt, add_special_tokens=False)))
    made = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt",
                     add_special_tokens=False)  # fmt: skip
    asked = made.attention_mask[:, 1:].clone()
    for row, start in enumerate(starts):
        asked[row, : start - 1] = 0
    return made.input_ids, asked


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of model, data, scorer and tools."""
    folder = tmp_path_factory.mktemp("calculator")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    save_model(tokenizer, folder / "model")
    for split, count in (("train", 256), ("test", 64)):
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": answer},
                "agent_name": "tool_agent",
            }
            for question, answer in sums(count, seed=len(split))
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    (folder / "scorer.py").write_text(SCORER)
    (folder / "tools.yaml").write_text(
        "tools:\n- class_name: CalculatorTool\n  config: {type: native}\n"
    )
    return folder


def overrides(task: Path, run_dir: Path) -> list[str]:
    return [
        f"data.train_files={task / 'train.parquet'}",
        f"data.val_files={task / 'test.parquet'}",
        "data.train_batch_size=16",
        "data.max_prompt_length=8",
        "data.max_response_length=24",
        f"actor_rollout_ref.model.path={task / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={task / 'tools.yaml'}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        f"custom_reward_function.path={task / 'scorer.py'}",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.rollout_data_dir={run_dir / 'dumps'}",
        f"trainer.default_local_dir={run_dir}",
    ]


def check_masks(batch: DataProto, tokenizer: Any) -> None:
    """What the policy was told is exactly what no loss, advantage or log-prob belongs to."""
    tensors = tensors_of(batch)
    width = tensors["prompts"].shape[-1]
    for row, fact in enumerate(batch.non_tensor_batch[COLUMN]):
        length = int(tensors["attention_mask"][row, width:].sum())
        ids, mask = tensors["responses"][row, :length], tensors["response_mask"][row].bool()
        told = tokenizer.decode(ids[~mask[:length]])
        if fact.num_turns == 2:
            assert told == ""
        else:
            assert re.fullmatch(r"<\|tool\|>.*<eos><\|assistant\|>", told), told
            assert "<tool_call>" in tokenizer.decode(ids).partition(told)[0]
        assert not mask[length:].any()
        for key in ("advantages", "rollout_log_probs"):
            assert (tensors[key][row][~mask] == 0).all(), key
        ours, theirs = (tensors[key][row][mask] for key in ("old_log_probs", "rollout_log_probs"))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_a_model_learns_to_call_the_calculator(task: Path, tmp_path: Path) -> None:
    config = load_config(overrides(task, tmp_path))
    settle(config, 0)
    trainer = TaskRunner(make_groups_for(config)).build(config)
    rates, rewards = [], []
    update = trainer.update

    def watched(batch: DataProto, *rest: Any, **named: Any) -> None:
        check_masks(batch, trainer.tokenizer)
        calls = [fact.tool_calls.get("calculator/ok", 0) for fact in batch.non_tensor_batch[COLUMN]]
        rates.append(sum(calls) / len(calls))
        rewards.append(float(tensors_of(batch)["token_level_scores"].sum(-1).mean()))
        update(batch, *rest, **named)

    trainer.update = watched  # type: ignore[method-assign]
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    # From 0.22 to 0.98 calls an answer, and from 0.22 to 0.86 right ones, when this was written.
    assert rates[0] < 0.4 and rewards[0] < 0.4
    assert sum(rates[-3:]) / 3 > 0.9
    assert sum(rewards[-3:]) / 3 > 0.7
    last = read_jsonl(tmp_path / "metrics.jsonl")[-1]["data"]
    assert last["tool_calls/calculator/ok"] == rates[-1] * 128
    assert last["num_turns/mean"] > 3.5  # the prompt, the call, its result and the answer
    assert last["timing_s/agent_loop/tool_calls/mean"] > 0
    dumped = read_jsonl(tmp_path / "dumps" / f"{STEPS}.jsonl")
    called = next(row for row in dumped if row["tool_calls"] == {"calculator/ok": 1})
    assert [event["kind"] for event in called["timeline"]] == ["generate", "tool", "generate"]
