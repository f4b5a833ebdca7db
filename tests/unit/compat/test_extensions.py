"""Code as users of verl write it: it runs here, through verl's imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto

from caldera.config import DataConfig, PPOTrainerConfig
from caldera.config.fields import ConfigGroup
from caldera.core_algos import ADV_ESTIMATORS, POLICY_LOSSES, FixedKLController
from caldera.data.create import create_rl_dataset
from caldera.demo.arithmetic import build_tokenizer
from caldera.errors import UnsupportedError
from caldera.reward import REWARD_MANAGERS
from caldera.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool

DATASET = """
from verl.utils.dataset.rl_dataset import RLHFDataset


class Mine(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        self.longest = config.get("max_prompt_length", 1024)
        self.missing = config.get("no_such_key", "nothing")
        self.key = config["prompt_key"]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["mine"] = (self.longest, self.missing, self.key, "shuffle" in self.config)
        return row
"""


def batch(**more: Any) -> DataProto:
    """Two prompts with two answers each, of two tokens and of one."""
    tensors = {
        "responses": torch.tensor([[1, 2], [1, 2], [1, 0], [1, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0]]),
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 0.0], [2.0, 0.0]]),
    }
    uids = np.array(["a", "a", "b", "b"], dtype=object)
    return DataProto.from_dict(tensors={**tensors, **more}, non_tensors={"uid": uids})


def test_advantages() -> None:
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask

    data = compute_advantage(batch(), AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=False)
    assert data.batch["response_mask"].tolist() == [[1, 1], [1, 1], [1, 0], [1, 0]]
    assert data.batch["advantages"].tolist() == [[-1, -1], [1, 1], [0, 0], [0, 0]]
    assert torch.equal(data.batch["response_mask"], compute_response_mask(data))


def test_the_penalty() -> None:
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    scores = torch.ones(4, 2)
    old, ref = torch.full((4, 2), -1.0), torch.full((4, 2), -1.5)
    data, metrics = apply_kl_penalty(
        batch(token_level_scores=scores, old_log_probs=old, ref_log_prob=ref),
        kl_ctrl=FixedKLController(0.1), kl_penalty="kl",
    )  # fmt: skip
    expected = torch.tensor([[0.95, 0.95], [0.95, 0.95], [0.95, 1.0], [0.95, 1.0]])
    torch.testing.assert_close(data.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)


def test_estimators_and_losses_are_registered() -> None:
    from verl.trainer.ppo.core_algos import (
        agg_loss,
        get_adv_estimator_fn,
        register_adv_est,
        register_policy_loss,
    )

    @register_adv_est("compat_estimator")
    def estimator(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards, token_level_rewards

    @register_policy_loss("compat_loss")
    def loss(
        old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any,
        loss_agg_mode: str = "token-mean", config: Any = None, rollout_is_weights: Any = None,
    ) -> Any:  # fmt: skip
        assert config.get("clip_ratio", None) is not None
        return agg_loss(-log_prob * advantages, response_mask, loss_agg_mode), {}

    assert ADV_ESTIMATORS["compat_estimator"] is get_adv_estimator_fn("compat_estimator")
    assert POLICY_LOSSES["compat_loss"] is loss


def test_a_reward_manager() -> None:
    from verl.trainer.ppo.reward import compute_reward
    from verl.workers.reward_manager import get_reward_manager_cls, register
    from verl.workers.reward_manager.abstract import AbstractRewardManager

    @register("compat_manager")
    class Mine(AbstractRewardManager):
        def __init__(
            self, tokenizer: Any, num_examine: int, compute_score: Any = None,
            reward_fn_key: str = "data_source", **kwargs: Any,
        ) -> None:  # fmt: skip
            self.worth = kwargs["worth"]

        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            rewards = torch.full(data.batch["responses"].shape, self.worth)
            return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards

    assert REWARD_MANAGERS["compat_manager"] is get_reward_manager_cls("compat_manager")
    rewards, _ = compute_reward(batch(), Mine(None, 0, worth=0.5))
    assert rewards.tolist() == [[0.5, 0.5]] * 4


def test_the_configured_manager_with_more_arguments(tmp_path: Path) -> None:
    from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager

    scorer = tmp_path / "score.py"
    scorer.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info, x):\n"
                      "    return x\n")  # fmt: skip
    config = PPOTrainerConfig()
    config.reward_manager.name = "naive"  # as loading resolves it
    config.custom_reward_function.path = str(scorer)
    function: Any = get_custom_reward_fn(config)
    assert function("s", "a", "t", None, 3) == 3
    manager: Any = load_reward_manager(config, build_tokenizer(), num_examine=0, x=0.25)
    assert manager.reward_kwargs == {"x": 0.25} and config.reward_model.reward_kwargs == {}


def test_a_manager_of_single_samples() -> None:
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    from caldera.reward.loading import is_single

    class Mine(RewardManagerBase):
        async def run_single(self, data: DataProto) -> dict[str, Any]:
            return {"reward_score": 1.0}

    assert is_single(Mine)
    assert Mine(PPOTrainerConfig(), None).config.get("trainer") is not None


def test_a_data_set(tmp_path: Path) -> None:
    file, module = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    row = {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "x"}
    file.write_text(json.dumps(row) + "\n")
    module.write_text(DATASET)
    config = DataConfig(train_files=[str(file)], max_prompt_length=8, seed=0)
    config.custom_cls.path, config.custom_cls.name = str(module), "Mine"
    item = create_rl_dataset([str(file)], config, build_tokenizer())[0]
    assert item["mine"] == (8, "nothing", "prompt", True)
    from verl.utils.dataset.rl_dataset import collate_fn

    assert collate_fn([item, item])["input_ids"].shape == (2, 8)


def test_a_worker() -> None:
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register

    class Mine(Worker):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def where(self) -> tuple[int, int]:
            return self.rank, self.world_size

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def scale(self, data: DataProto) -> DataProto:
            return DataProto.from_dict(tensors={"x": data.batch["responses"] * self.factor})

    group: Any = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Mine, 3))
    assert group.where() == [(0, 1)]
    assert group.scale(batch()).batch["x"].tolist() == [[3, 6], [3, 6], [3, 0], [3, 0]]
    group.shutdown()


def test_helpers(tmp_path: Path) -> None:
    from verl.utils.debug import marked_timer
    from verl.utils.fs import copy_to_local
    from verl.utils.import_utils import load_extern_type
    from verl.utils.seqlen_balancing import get_reverse_idx
    from verl.utils.torch_functional import logprobs_from_logits, masked_mean

    timing: dict[str, float] = {}
    with marked_timer("gen", timing, color="red"):
        pass
    assert timing["gen"] >= 0
    assert copy_to_local(str(tmp_path)) == str(tmp_path)
    with pytest.raises(UnsupportedError, match="use_shm"):
        copy_to_local(str(tmp_path), use_shm=True)
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    assert load_extern_type(str(tmp_path / "mine.py"), "Mine").__name__ == "Mine"
    assert [[4, 2, 9][i] for i in get_reverse_idx([2, 0, 1])] == [2, 9, 4]
    values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [1, 0]])
    assert masked_mean(values, mask, axis=-1).tolist() == pytest.approx([2.0, 5.0])
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = torch.distributions.Categorical(logits=logits).log_prob(labels)
    torch.testing.assert_close(logprobs_from_logits(logits, labels), expected)


def test_groups_that_extensions_get_have_their_values_by_name() -> None:
    config = PPOTrainerConfig()
    parts = config.actor_rollout_ref
    for group in (
        config, config.data, config.algorithm, config.critic, config.trainer, config.reward_model,
        parts, parts.actor, parts.actor.policy_loss, parts.rollout, parts.ref, parts.model,
    ):  # fmt: skip
        assert isinstance(group, ConfigGroup)
    assert parts.rollout["n"] == parts.rollout.get("n", 9) == 1
    assert "n" in parts.rollout and "no_such_key" not in parts.rollout
    with pytest.raises(KeyError, match="no_such_key"):
        parts.rollout["no_such_key"]
