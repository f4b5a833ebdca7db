"""The files of docs/extending.md change a run as the page says, without a change to the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

PAGE = Path(__file__).parents[2] / "docs/extending.md"
FILE = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extensions")
    for found in FILE.finditer(PAGE.read_text(encoding="utf-8")):
        (folder / found["name"]).write_text(found["code"], encoding="utf-8")
    return folder


def test_a_trainer_overrides_a_phase(lab: Lab, files: Path, tmp_path: Path) -> None:
    steps = f"trainer.total_training_steps={STEPS}"
    plain = lab.train(tmp_path / "plain", steps)
    own = lab.train(
        tmp_path / "own", steps, "custom.price_of_a_token=0.1",
        f"trainer.class={files}/length_trainer.py:LengthTrainer",
    )  # fmt: skip
    assert own[0]["critic/score/mean"] < plain[0]["critic/score/mean"]
    assert own[0]["response_length/mean"] == plain[0]["response_length/mean"]


def test_a_worker_of_two_ranks_has_a_further_method(lab: Lab, files: Path, tmp_path: Path) -> None:
    rows = lab.train(
        tmp_path, "trainer.total_training_steps=1", "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256",
        f"actor_rollout_ref.worker_class={files}/counting_worker.py:CountingWorker",
        f"trainer.class={files}/counting_trainer.py:CountingTrainer",
    )  # fmt: skip
    assert rows[0]["counting/tokens"] == rows[0]["perf/total_num_tokens"]
    assert rows[0]["counting/ranks"] == 2


def test_a_sampler_that_is_a_class_of_a_file(lab: Lab, files: Path, tmp_path: Path) -> None:
    """On the module's weights, so that training log-probs are its own, before each update."""
    sampler = f"actor_rollout_ref.rollout.name={files}/plain_sampler.py:PlainSampler"
    small = ("data.train_batch_size=5", "actor_rollout_ref.rollout.n=2")
    rows = lab.train(tmp_path / "own", f"trainer.total_training_steps={STEPS}", *small, sampler)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    key = "actor_rollout_ref.rollout.enable_prefix_caching"
    with pytest.raises(AssertionError, match=f"{key}=True: takes .*name=native, vllm or sglang, "):
        lab.train(tmp_path / "refused", *small, sampler, f"{key}=True")


def test_custom_keys_reach_a_score_function(lab: Lab, files: Path, tmp_path: Path) -> None:
    score = f"custom_reward_function.path={files}/threshold_reward.py"
    steps = "trainer.total_training_steps=1"
    (short,) = lab.train(tmp_path / "short", score, steps, "custom.longest=0")
    (long,) = lab.train(tmp_path / "long", score, steps, "custom.longest=99")
    assert short["critic/score/mean"] < long["critic/score/mean"] == 1


READERS = """
import torch

from caldera.agent_loop.base import AgentLoopBase, AgentLoopOutput
from caldera.data import RLHFDataset
from caldera.protocol import tensors_of
from caldera.trainer.ppo.trainer import PPOTrainer


def mark(custom, reader):
    with open(custom["marks"], "a") as file:
        file.write(reader + "\\n")


class Rows(RLHFDataset):
    def __getitem__(self, index):
        mark(self.config.custom, "data set")
        return super().__getitem__(index)


class Loop(AgentLoopBase):
    async def run(self, sampling_params, **row):
        mark(self.config.custom, "loop")
        prompt = await self.apply_chat_template(row["raw_prompt"])
        sampled = await self.server_manager.generate(row["uid"], prompt, sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=sampled.token_ids,
            response_mask=[1] * len(sampled.token_ids),
            response_logprobs=sampled.log_probs,
            num_turns=2,
        )


class Manager:
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key, custom):
        mark(custom, "reward manager")

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros(tensors_of(data)["responses"].shape)
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


class Trainer(PPOTrainer):
    def advantage(self, batch, metrics, timing):
        mark(self.config.custom, "trainer")
        return super().advantage(batch, metrics, timing)
"""


def test_custom_keys_reach_data_set_loop_manager_and_trainer(lab: Lab, tmp_path: Path) -> None:
    file, loops, marks = (tmp_path / name for name in ("mine.py", "loops.yaml", "marks.txt"))
    file.write_text(READERS, encoding="utf-8")
    loops.write_text(f"- name: mine\n  _target_: {file}:Loop\n", encoding="utf-8")
    agent = "actor_rollout_ref.rollout.agent"
    lab.train(
        tmp_path / "run", "trainer.total_training_steps=1", f"custom.marks={marks}",
        "data.train_batch_size=5", f"trainer.class={file}:Trainer",
        f"data.custom_cls.path={file}", "data.custom_cls.name=Rows",
        f"{agent}.agent_loop_config_path={loops}", f"{agent}.default_agent_loop=mine",
        "reward_manager.source=importlib", f"reward_manager.module.path={file}",
        "reward_manager.module.name=Manager",
    )  # fmt: skip
    readers = set(marks.read_text(encoding="utf-8").splitlines())
    assert readers == {"data set", "loop", "reward manager", "trainer"}


ESTIMATOR = """
def estimate(token_level_rewards, response_mask, values, reward_baselines):
    lead = token_level_rewards.sum(-1, keepdim=True) - reward_baselines[:, None]
    return (lead - values) * response_mask, lead * response_mask

estimate.needs = {"critic", "greedy_baseline"}
"""


def test_an_estimator_gets_what_it_needs(lab: Lab, tmp_path: Path) -> None:
    """A critic, and the rewards of greedy responses; without the critic it is refused."""
    file = tmp_path / "estimator.py"
    file.write_text(ESTIMATOR, encoding="utf-8")
    run = (f"algorithm.adv_estimator={file}:estimate", "trainer.total_training_steps=1")
    critic = f"critic.model.path={lab.model}"
    (row,) = lab.train(tmp_path / "run", *run, critic)
    assert "critic/vf_loss" in row
    assert "timing_s/gen_max" in row
    with pytest.raises(AssertionError, match=r"critic.enable=False.*:estimate needs the critic"):
        lab.train(tmp_path / "refused", *run, critic, "critic.enable=False")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.class", "nothing", "or a registered trainer (ppo, supervised)"),
        ("trainer.class", "supervised", "SupervisedTrainer, which is not derived from PPOTrainer"),
        ("actor_rollout_ref.worker_class", "critic", "is CriticWorker, which is not derived from"),
        ("critic.worker_class", "missing.py:Worker", "missing.py does not exist"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_used_is_named_before_a_model_is_loaded(
    lab: Lab, tmp_path: Path, key: str, value: str, said: str
) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        lab.train(tmp_path, "algorithm.adv_estimator=gae", f"{key}={value}")
