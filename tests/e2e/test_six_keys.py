"""A whole GRPO run takes six keys, a file of plain rows and a function."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from caldera.demo.arithmetic import build_model, build_tokenizer
from caldera.trainer.main_ppo import main
from caldera.trainer.sft_trainer import SFT

ROWS = [
    {"prompt": "12+34", "answer": "46"},
    {"prompt": "10+10", "answer": "20"},
    {"prompt": "05+05", "answer": "10"},
]
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["answer"] == ground_truth
    return float(solution_str[:1] == ground_truth[:1])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model, three rows and a reward function; it is the current one."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SIX = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=rows.jsonl",
    "actor_rollout_ref.model.path=model",
    "custom_reward_function.path=reward.py",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.total_training_steps=2",
]


def test_six_keys(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caldera"):
        assert main(SIX) == 0
    assert (
        "chosen for 3 training rows: data.train_batch_size=3, "
        "actor_rollout_ref.actor.ppo_mini_batch_size=3; each step samples 8 responses to each of 3 "
        "prompts"
    ) in caplog.messages
    assert "no data.val_files: the run does not validate" in caplog.messages
    run = folder / "checkpoints" / "caldera_examples" / "gsm8k"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["data"]["actor/grad_norm"] > 0
    assert not any(key.startswith("val-") for row in rows for key in row["data"])


def test_supervised_training_takes_four(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ["data.train_files=rows.jsonl", "data.prompt_key=prompt", "data.response_key=answer"]
    with caplog.at_level(logging.INFO, "caldera"):
        assert SFT.main([*keys, "model.path=model", "trainer.total_training_steps=2"]) == 0
    assert "chosen for 3 training rows: data.train_batch_size=3" in caplog.messages
    rows = (folder / "checkpoints" / "gsm8k-sft" / "test" / "metrics.jsonl").read_text()
    losses = [json.loads(row)["data"]["train/loss"] for row in rows.splitlines()]
    assert losses[1] < losses[0]


def test_an_adapter_is_a_folder_of_pefts(folder: Path) -> None:
    """Loaded by peft it is the model that was trained, which the checkpoint holds merged as
    well."""
    merged = "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"
    lora = ["actor_rollout_ref.model.lora_rank=4", "trainer.save_freq=2", merged]
    assert main([*SIX, *lora, "trainer.default_local_dir=run"]) == 0
    actor = folder / "run" / "global_step_2" / "actor"
    base = AutoModelForCausalLM.from_pretrained("model")
    tokens = torch.randint(3, 15, (2, 9))
    before = base(tokens).logits
    loaded = peft.PeftModel.from_pretrained(base, actor / "lora_adapter")
    trained = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    torch.testing.assert_close(loaded(tokens).logits, trained(tokens).logits)
    assert not torch.allclose(loaded(tokens).logits, before)
    named = peft.AutoPeftModelForCausalLM.from_pretrained(actor / "lora_adapter")
    torch.testing.assert_close(named(tokens).logits, trained(tokens).logits)


def test_rows_of_which_nobody_knows_the_scorer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([key for key in SIX if not key.startswith("custom_reward")]) == 2
    assert capsys.readouterr().err == (
        "caldera: error: data.train_files: rows.jsonl has no column 'data_source', which picks "
        "the scorer (data.reward_fn_key); its columns are prompt, answer. Add it (docs/rewards.md "
        "names the scorers), or score without it: by a custom function "
        "(custom_reward_function.path=FILE.py) or a reward model (reward_model.enable=True)\n"
    )
