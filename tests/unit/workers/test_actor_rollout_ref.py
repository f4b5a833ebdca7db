"""The policy's worker, called through its group as the trainer does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from caldera.errors import ConfigError
from caldera.protocol import DataProto
from caldera.rollout import HFRollout, NativeRollout
from caldera.single_controller import WorkerGroup

Policy = Callable[..., Any]
Advantages = Callable[[DataProto], DataProto]
REF = "actor_rollout_ref"
LORA = (f"{REF}.model.lora_rank=4", f"{REF}.model.lora_alpha=8")


def worker_of(group: Any) -> Any:
    return group.workers[0]


def weights(group: WorkerGroup) -> dict[str, Tensor]:
    module = worker_of(group).actor.module
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def answers(group: WorkerGroup, prompts: DataProto) -> DataProto:
    """What the trainer has before an update: answers and their log-probs."""
    batch = group.generate_sequences(copy.deepcopy(prompts))
    assert isinstance(batch, DataProto)
    return batch.union(group.compute_log_prob(batch))


def disagreement(batch: DataProto) -> float:
    """Largest difference of log-probs between the sampler and the engine."""
    assert batch.batch is not None
    assert batch.batch["rollout_log_probs"].min() < -0.5
    return (batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"]).abs().max().item()


def test_a_batch_of_answers(policy: Policy, prompts: DataProto) -> None:
    batch = answers(policy(), prompts)
    tensors = batch.batch
    assert tensors is not None
    assert tensors["responses"].shape == (6, 8)
    assert tensors["input_ids"].shape == (6, 12)
    assert tensors["entropys"].shape == (6, 8)
    mask = tensors["response_mask"]
    for row, kept in zip(tensors["responses"], mask, strict=True):
        length = int(kept.sum())
        tokens = row[:length].tolist()
        assert 1 <= length <= 8
        assert 2 not in tokens[:-1]
        assert tokens[-1] == 2 or length == 8
        assert row[length:].tolist() == [0] * (8 - length)
    for name in ("old_log_probs", "entropys", "rollout_log_probs"):
        assert (tensors[name][mask == 0] == 0).all()
    assert (tensors["entropys"][mask == 1] > 0).all()


@pytest.mark.parametrize("sampler", ["native", "hf"])
def test_stops_of_the_run_end_answers(policy: Policy, prompts: DataProto, sampler: str) -> None:
    """Tokens 3 to 47 are the letters from A on; a stop stays in the answer and is trained."""
    keys = (f"{REF}.rollout.name={sampler}", f"{REF}.rollout.do_sample=False")
    free = policy(*keys).generate_sequences(copy.deepcopy(prompts)).batch
    responses, lengths = free["responses"].tolist(), free["response_mask"].sum(1).tolist()
    assert lengths[0] > 3 and lengths[2] > 3
    token, text = responses[0][2], decoded(responses[2][1:3])
    group = policy(
        *keys, f"{REF}.rollout.stop_token_ids=[{token}]", f"{REF}.rollout.stop=['{text}']"
    )
    batch = group.generate_sequences(prompts)
    for row, (tokens, length) in enumerate(zip(responses, lengths, strict=True)):
        tokens = tokens[:length]
        ends = [i + 1 for i, one in enumerate(tokens) if one == token]
        ends += [i + 2 for i in range(length - 1) if decoded(tokens[i : i + 2]) == text]
        end = min([length, *ends])
        assert batch.batch["responses"][row].tolist() == tokens[:end] + [0] * (8 - end)
        assert batch.batch["response_mask"][row].tolist() == [1] * end + [0] * (8 - end)
    assert all(batch.batch["response_mask"].sum(1)[row] < lengths[row] for row in (0, 2))


def decoded(tokens: list[int]) -> str:
    return " ".join(chr(ord("A") + token - 3) for token in tokens)


def test_stop_tokens_are_tokens_of_the_model(policy: Policy) -> None:
    with pytest.raises(ConfigError, match=r"rollout.stop_token_ids=\[3, 48\]: .* 0 to 47"):
        policy(f"{REF}.rollout.stop_token_ids=[3,48]")


def test_exact_mode_needs_one_module(policy: Policy) -> None:
    with pytest.raises(ConfigError, match=r"native.exact=True: .* one module.*bfloat16"):
        policy(f"{REF}.rollout.native.exact=True", f"{REF}.rollout.dtype=bfloat16")


def test_squared_probabilities_on_request(policy: Policy, prompts: DataProto) -> None:
    assert "sum_pi_squared" not in answers(policy(), prompts).batch
    group = policy(f"{REF}.actor.calculate_sum_pi_squared=True")
    tensors = answers(group, prompts).batch
    inside = tensors["response_mask"] == 1
    squares = tensors["sum_pi_squared"]
    assert squares.shape == (6, 8)
    assert (squares[~inside] == 0).all()
    # Never less than that of the sampled token, nor than that of the flattest distribution.
    assert (squares >= (2 * tensors["old_log_probs"]).exp() - 1e-6)[inside].all()
    assert ((squares > 1 / 48) & (squares <= 1))[inside].all()


def test_use_of_the_device_is_not_reported_on_a_cpu(policy: Policy, prompts: DataProto) -> None:
    group = policy()
    batch = group.generate_sequences(prompts)
    assert group.compute_log_prob(batch).meta_info["metrics"] == {}


@pytest.mark.parametrize("sampler", ["native", "hf"])
def test_sampler_and_engine_agree(policy: Policy, prompts: DataProto, sampler: str) -> None:
    group = policy(f"{REF}.rollout.name={sampler}")
    kinds = {"native": NativeRollout, "hf": HFRollout}
    assert type(worker_of(group).rollout) is kinds[sampler]
    assert disagreement(answers(group, prompts)) < 1e-4


def test_answers_are_a_function_of_their_seeds(policy: Policy, prompts: DataProto) -> None:
    group = policy()
    first, second = answers(group, prompts), answers(group, prompts)
    assert torch.equal(first.batch["responses"], second.batch["responses"])
    prompts.non_tensor_batch["sample_seed"] += 100
    assert not torch.equal(first.batch["responses"], answers(group, prompts).batch["responses"])


def test_an_update_changes_the_weights(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    group = policy()
    before = weights(group)
    batch = advantages(answers(group, prompts))
    metrics = group.update_actor(batch).meta_info["metrics"]
    assert worker_of(group).actor.version == 1
    after = weights(group)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert metrics["actor/lr"] == [0.02]
    assert metrics["actor/grad_norm"][0] > 0
    # One mini-batch in one epoch is on policy: the ratio is exactly 1.
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == [0.0]
    assert "actor/entropy_loss" not in metrics
    assert "actor/kl_loss" not in metrics


def test_an_update_makes_good_answers_likelier(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    group = policy()
    batch = advantages(answers(group, prompts))
    group.update_actor(batch)
    change = group.compute_log_prob(batch).batch["old_log_probs"] - batch.batch["old_log_probs"]
    assert (change * batch.batch["advantages"]).sum() > 0


def test_answers_after_an_update_come_from_the_new_weights(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    group = policy()
    worker = worker_of(group)
    assert worker.rollout.module is worker.actor.module, "nothing is copied"
    old = advantages(answers(group, prompts))
    group.update_actor(old)
    new = answers(group, prompts)
    assert disagreement(new) < 1e-4
    assert worker.rollout.version == 1
    assert not torch.equal(new.batch["rollout_log_probs"], old.batch["rollout_log_probs"])


def test_mini_batches_epochs_and_a_seeded_order(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    overrides = (f"{REF}.actor.ppo_mini_batch_size=1", f"{REF}.actor.ppo_epochs=2")
    runs = []
    for shuffle in ("False", "True", "True"):
        group = policy(*overrides, f"{REF}.actor.shuffle={shuffle}")
        metrics = group.update_actor(advantages(answers(group, prompts))).meta_info["metrics"]
        assert worker_of(group).actor.version == 6  # three mini-batches of 1 prompt x 2 answers
        assert metrics["actor/ppo_kl"] != [0.0]
        runs.append(weights(group))
    assert all(torch.equal(runs[1][name], runs[2][name]) for name in runs[0])
    assert not all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_micro_batches_by_tokens(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    results = []
    for overrides in (
        (),
        (f"{REF}.actor.use_dynamic_bsz=True", f"{REF}.actor.ppo_max_token_len_per_gpu=14"),
    ):
        group = policy(*overrides)
        batch = advantages(answers(group, prompts))
        loss = group.update_actor(batch).meta_info["metrics"]["actor/pg_loss"][0]
        results.append((batch.batch["old_log_probs"], loss))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-5)


def test_averages_within_micro_batches(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    losses = []
    for flag in ("False", "True"):
        group = policy(f"{REF}.actor.classic_loss_normalization={flag}")
        batch = advantages(answers(group, prompts))
        batch.batch["response_mask"][:3, 2:] = 0  # as after a rejection
        losses.append(group.update_actor(batch).meta_info["metrics"]["actor/pg_loss"][0])
    mask, matrix = batch.batch["response_mask"], -batch.batch["advantages"]  # the ratio is 1
    assert losses[0] == pytest.approx((matrix * mask).sum().item() / mask.sum().item(), abs=1e-6)
    means = [(matrix * mask)[i : i + 2].sum() / mask[i : i + 2].sum() for i in (0, 2, 4)]
    assert losses[1] == pytest.approx(sum(means).item() / 3, abs=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-3


def test_the_reference_stays(policy: Policy, prompts: DataProto, advantages: Advantages) -> None:
    group = policy(f"{REF}.actor.use_kl_loss=True", f"{REF}.actor.entropy_coeff=0.01")
    batch = advantages(answers(group, prompts))
    reference = group.compute_ref_log_prob(batch)
    torch.testing.assert_close(reference.batch["ref_log_prob"], batch.batch["old_log_probs"])
    metrics = group.update_actor(batch.union(reference)).meta_info["metrics"]
    assert metrics["actor/kl_loss"][0] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/kl_coef"] == [0.001]
    assert metrics["actor/entropy_loss"][0] > 0
    again = group.compute_ref_log_prob(batch)
    assert torch.equal(again.batch["ref_log_prob"], reference.batch["ref_log_prob"])
    assert group.update_actor(batch).meta_info["metrics"]["actor/kl_loss"][0] > 1e-3


FULL = (f"{REF}.actor.use_kl_loss=True", f"{REF}.actor.kl_loss_type=full")


@pytest.mark.parametrize("adapter", [(), LORA], ids=["whole", "adapter"])
def test_the_full_kl(
    policy: Policy, prompts: DataProto, advantages: Advantages, adapter: tuple[str, ...]
) -> None:
    group = policy(*FULL, *adapter, f"{REF}.actor.kl_loss_coef=0.5")
    batch = advantages(answers(group, prompts))
    # No ref_log_prob is needed, and at first actor and reference are the same.
    losses = [group.update_actor(batch).meta_info["metrics"]["actor/kl_loss"][0] for _ in range(3)]
    assert losses[0] == pytest.approx(0, abs=1e-6)
    assert losses[2] > losses[1] > 1e-4

    batch.meta_info["full_kl"] = True
    reference = group.compute_ref_log_prob(batch).batch
    inside = batch.batch["response_mask"] == 1
    full_kl = reference["full_kl"]
    assert (full_kl[~inside] == 0).all()
    # What an update would see next is the mean over tokens of what stands here.
    metrics = group.update_actor(batch).meta_info["metrics"]
    mean = full_kl[inside].mean().item()
    assert metrics["actor/kl_loss"][0] == pytest.approx(mean, rel=1e-4)


def test_the_full_kl_is_that_of_all_tokens(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    """The plain estimate on answers of the trained policy averages to it."""
    group = policy()
    group.update_actor(advantages(answers(group, prompts)))
    many = DataProto.concat([copy.deepcopy(prompts) for _ in range(100)])
    many.non_tensor_batch["sample_seed"] = np.arange(600).astype(object)
    many.meta_info["full_kl"] = True
    batch = answers(group, many)
    batch.meta_info["full_kl"] = True
    reference = group.compute_ref_log_prob(batch).batch
    inside = batch.batch["response_mask"] == 1
    estimate = (batch.batch["old_log_probs"] - reference["ref_log_prob"])[inside]
    full_kl = reference["full_kl"][inside]
    error = estimate.std() / len(estimate) ** 0.5
    assert full_kl.mean() > 5 * error
    assert abs(estimate.mean() - full_kl.mean()) < 4 * error


def test_a_role_without_reference_has_none(policy: Policy, prompts: DataProto) -> None:
    group = policy(role="actor_rollout")
    batch = answers(group, prompts)
    with pytest.raises(AssertionError, match="no reference"):
        group.compute_ref_log_prob(batch)


def test_a_sampler_of_another_precision_is_refreshed(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    group = policy(f"{REF}.rollout.dtype=bfloat16")
    worker = worker_of(group)
    sampler, actor = worker.rollout.module, worker.actor.module
    assert sampler is not actor
    assert (sampler.dtype, actor.dtype) == (torch.bfloat16, torch.float32)
    for version in range(2):
        batch = advantages(answers(group, prompts))
        assert worker.rollout.version == version
        for (name, one), two in zip(sampler.named_parameters(), actor.parameters(), strict=True):
            assert torch.equal(one, two.bfloat16()), name
        assert disagreement(batch) < 0.2
        group.update_actor(batch)


def test_weights_go_over_only_when_they_have_changed(policy: Policy, prompts: DataProto) -> None:
    group = policy(f"{REF}.rollout.dtype=bfloat16")
    answers(group, prompts)
    module = worker_of(group).rollout.module
    with torch.no_grad():
        next(module.parameters()).zero_()
    answers(group, prompts)
    assert not next(module.parameters()).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter(policy: Policy, prompts: DataProto, advantages: Advantages, dtype: str) -> None:
    """The sampler has it, merged or not; the reference is the actor without it."""
    base = policy()
    group = policy(*LORA, f"{REF}.rollout.dtype={dtype}")
    worker = worker_of(group)
    assert worker.reference is worker.actor
    batch = advantages(answers(group, prompts))
    for _ in range(3):
        group.update_actor(batch)
    new = answers(group, prompts)
    assert disagreement(new) < (1e-4 if dtype == "float32" else 0.2)
    reference = group.compute_ref_log_prob(new).batch["ref_log_prob"]
    expected = base.compute_log_prob(new).batch["old_log_probs"]
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
    assert (new.batch["old_log_probs"] - expected).abs().max() > 0.1
    unchanged = group.compute_log_prob(new).batch["old_log_probs"]
    assert torch.equal(unchanged, new.batch["old_log_probs"]), "the adapter is back on"


def test_offloading_on_a_cpu_changes_nothing(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    memory = f"{REF}.actor.fsdp_config"
    runs = []
    for flag in ("False", "True"):
        group = policy(
            f"{memory}.param_offload={flag}",
            f"{memory}.optimizer_offload={flag}",
            f"{REF}.rollout.free_cache_engine={flag}",
        )
        for _ in range(2):
            group.update_actor(advantages(answers(group, prompts)))
        runs.append(weights(group))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_gradient_checkpointing_changes_nothing(
    policy: Policy, prompts: DataProto, advantages: Advantages
) -> None:
    runs = []
    for flag in ("False", "True"):
        group = policy(f"{REF}.model.enable_gradient_checkpointing={flag}")
        assert worker_of(group).actor.module.is_gradient_checkpointing == (flag == "True")
        group.update_actor(advantages(answers(group, prompts)))
        runs.append(weights(group))
    for name, tensor in runs[0].items():
        torch.testing.assert_close(runs[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_a_checkpoint(
    policy: Policy, prompts: DataProto, advantages: Advantages, tmp_path: Path
) -> None:
    contents = f"{REF}.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    group = policy(contents)
    batch = advantages(answers(group, prompts))
    group.update_actor(batch)
    group.save_checkpoint(tmp_path / "actor")
    folder = tmp_path / "actor" / "huggingface"
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    trained = weights(group)
    assert all(torch.equal(saved[name], trained[name]) for name in trained)
    assert not (tmp_path / "actor" / "lora_adapter").exists()

    resumed = policy(contents)
    resumed.load_checkpoint(tmp_path / "actor")
    assert disagreement(answers(resumed, prompts)) < 1e-4
    for both in (group, resumed):
        both.update_actor(batch)
    after, again = weights(group), weights(resumed)
    assert all(torch.equal(after[name], again[name]) for name in after)


def test_a_checkpoint_with_an_adapter(
    policy: Policy, prompts: DataProto, advantages: Advantages, tmp_path: Path
) -> None:
    group = policy(*LORA)
    group.update_actor(advantages(answers(group, prompts)))
    group.save_checkpoint(tmp_path)
    assert (tmp_path / "lora_adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "huggingface" / "config.json").is_file()
    resumed = policy(*LORA)
    resumed.load_checkpoint(tmp_path)
    after, again = weights(group), weights(resumed)
    assert all(torch.equal(after[name], again[name]) for name in after)
