"""The critic's worker, called through its group as the trainer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from caldera.protocol import DataProto

Group = Callable[..., Any]
Advantages = Callable[[DataProto], DataProto]


@pytest.fixture
def batch(prompts: DataProto, advantages: Advantages) -> DataProto:
    """Six answers of different lengths, one of them empty."""
    assert prompts.batch is not None
    generator = torch.Generator().manual_seed(1)
    responses = torch.randint(3, 48, (6, 8), generator=generator)
    lengths = torch.tensor([8, 3, 1, 0, 5, 8])[:, None]
    mask = (torch.arange(8) < lengths).long()
    attention = torch.cat([prompts.batch["attention_mask"], mask], 1)
    return advantages(
        DataProto.from_dict(
            {
                "input_ids": torch.cat([prompts.batch["input_ids"], responses], 1),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
                "responses": responses,
                "response_mask": mask,
            }
        )
    )


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_values_and_updates(critic: Group, batch: DataProto, lora_rank: int) -> None:
    group = critic(f"critic.model.lora_rank={lora_rank}", "critic.cliprange_value=100")
    mask = batch.batch["response_mask"]
    losses = []
    for _ in range(15):
        values = group.compute_values(batch).batch["values"]
        assert values.shape == (6, 8)
        assert (values[mask == 0] == 0).all()
        batch.batch["values"] = values
        metrics = group.update_critic(batch).meta_info["metrics"]
        losses.append(metrics["critic/vf_loss"][0])
        error = (values - batch.batch["returns"])[mask == 1].square().mean().item() / 2
        assert losses[-1] == pytest.approx(error, rel=1e-3)
        mean = values[mask == 1].mean().item()
        assert metrics["critic/vpred_mean"][0] == pytest.approx(mean, rel=1e-3, abs=1e-4)
    assert losses[-1] < 0.5 * losses[0]
    assert metrics.keys() == {
        *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")),
        "perf/cpu_memory_used_gb",
    }
    assert metrics["critic/lr"] == [0.01]
    assert group.workers[0].engine.version == 15


def test_values_do_not_depend_on_the_micro_batches(critic: Group, batch: DataProto) -> None:
    expected = critic().compute_values(batch).batch["values"]
    for overrides in (
        ["critic.forward_micro_batch_size_per_gpu=5"],
        ["critic.use_dynamic_bsz=True", "critic.forward_max_token_len_per_gpu=15"],
    ):
        values = critic(*overrides).compute_values(batch).batch["values"]
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


def test_mini_batches(critic: Group, batch: DataProto) -> None:
    group = critic("critic.ppo_mini_batch_size=1", "critic.ppo_epochs=2")
    batch.union(group.compute_values(batch))
    group.update_critic(batch)
    assert group.workers[0].engine.version == 6  # three mini-batches of 1 prompt x 2 answers


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_checkpoint(critic: Group, batch: DataProto, tmp_path: Path, lora_rank: int) -> None:
    overrides = (
        f"critic.model.lora_rank={lora_rank}",
        "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )
    group = critic(*overrides)
    batch.union(group.compute_values(batch))
    group.update_critic(batch)
    group.save_checkpoint(tmp_path)
    resumed = critic(*overrides, "critic.model.fsdp_config.seed=7")
    resumed.load_checkpoint(tmp_path)
    values = group.compute_values(batch).batch["values"]
    assert torch.equal(resumed.compute_values(batch).batch["values"], values)
    assert (tmp_path / "lora_adapter").exists() == (lora_rank > 0)
    exported = AutoModelForTokenClassification.from_pretrained(tmp_path / "huggingface")
    scores = exported(
        batch.batch["input_ids"],
        attention_mask=batch.batch["attention_mask"],
        position_ids=batch.batch["position_ids"],
    ).logits[:, 3:-1, 0]
    mask = batch.batch["response_mask"]
    torch.testing.assert_close(scores * mask, values, rtol=1e-3, atol=1e-4)
