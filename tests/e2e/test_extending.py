"""The files of docs/extending.md, and of pages that it names, change a run as they say, without a
change to the package."""

from __future__ import annotations

import asyncio
import re
import threading
from http.server import HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from caldera.data import load_object
from caldera.tools.search import RetrieverClient
from caldera.tracking.dumps import read_jsonl

if TYPE_CHECKING:
    from tests.conftest import Lab

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "extending.md"
FILE = re.compile(
    r"^(?:```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```"
    r"|cat > (?P<written>\w+\.py) <<'PYTHON'\n(?P<text>.*?)^PYTHON)$",
    re.MULTILINE | re.DOTALL,
)
EXAMPLE = re.compile(r"\| \[(?P<name>\w+\.py)\]\((?P<page>[^)#]*)[^)]*\), (?P<lines>\d+) lines \|")
STEPS = 2
SMALL = ("data.train_batch_size=5", "actor_rollout_ref.rollout.n=2")


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows, or that its commands write, by their names."""
    found = FILE.finditer(page.read_text(encoding="utf-8"))
    return {f["name"] or f["written"]: f["code"] or f["text"] for f in found}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extensions")
    for page in (PAGE, DOCS / "agents.md", DOCS / "retriever.md"):
        for name, code in files_of(page).items():
            (folder / name).write_text(code, encoding="utf-8")
    return folder


def test_the_table_names_every_example_with_its_lines() -> None:
    """The lines that are not blank."""
    named = list(EXAMPLE.finditer(PAGE.read_text(encoding="utf-8")))
    for example in named:
        page = (DOCS / example["page"]) if example["page"] else PAGE
        shown = files_of(page).get(example["name"])
        code = shown or (page.parent / example["name"]).read_text(encoding="utf-8")
        lines = sum(bool(line.strip()) for line in code.splitlines())
        assert f"{lines} lines" == f"{example['lines']} lines", example["name"]
    assert files_of(PAGE).keys() <= {example["name"] for example in named}


def test_a_trainer_overrides_a_phase(lab: Lab, files: Path, tmp_path: Path) -> None:
    steps = f"trainer.total_training_steps={STEPS}"
    plain = lab.train(tmp_path / "plain", steps)
    mine = lab.train(
        tmp_path / "mine", steps, "custom.price_of_a_token=0.1",
        f"trainer.class={files}/length_trainer.py:LengthTrainer",
    )  # fmt: skip
    assert mine[0]["critic/score/mean"] < plain[0]["critic/score/mean"]
    assert mine[0]["response_length/mean"] == plain[0]["response_length/mean"]


def test_a_trainer_overrides_validation(lab: Lab, files: Path, tmp_path: Path) -> None:
    (row,) = lab.train(
        tmp_path, "trainer.total_training_steps=1", *SMALL, "trainer.test_freq=1",
        f"trainer.class={files}/mean_validation.py:MeanValidation",
    )  # fmt: skip
    (core,) = (key for key in row if key.startswith("val-core/") and "/all/" not in key)
    assert row["val-core/all/mean"] == row[core]


def test_a_trainer_with_another_kl(lab: Lab, files: Path, tmp_path: Path) -> None:
    kl = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0")
    run = (f"trainer.total_training_steps={STEPS}", *kl)
    trainer = f"trainer.class={files}/tolerant_kl.py:TolerantKL"
    plain = lab.train(tmp_path / "plain", *run)
    mine = lab.train(tmp_path / "mine", *run, trainer)
    assert mine[0]["actor/excess_kl"] == 0 < mine[1]["actor/excess_kl"]
    assert mine[0]["critic/score/mean"] == plain[0]["critic/score/mean"]
    assert mine[1]["critic/score/mean"] < plain[1]["critic/score/mean"]


def test_a_reward_manager_compares_the_responses_to_a_prompt(
    lab: Lab, files: Path, tmp_path: Path
) -> None:
    manager = {"source": "importlib", "module.path": f"{files}/shortest_manager.py"}
    manager["module.name"] = "ShortestManager"
    overrides = [f"reward_manager.{key}={value}" for key, value in manager.items()]
    steps = "trainer.total_training_steps=1"
    hot = "actor_rollout_ref.rollout.temperature=2"  # so that right responses differ in length
    (plain,) = lab.train(tmp_path / "plain", steps, hot)
    (mine,) = lab.train(tmp_path / "mine", steps, hot, *overrides)
    assert mine["response_length/mean"] == plain["response_length/mean"]
    assert 0 < mine["critic/score/mean"] <= plain["critic/score/mean"]


def test_a_data_set_leaves_out_rows(lab: Lab, files: Path, tmp_path: Path) -> None:
    rows = lab.train(
        tmp_path / "run", "trainer.total_epochs=1", *SMALL, f"trainer.rollout_data_dir={tmp_path}",
        f"data.custom_cls.path={files}/easy_sums.py", "data.custom_cls.name=EasySums",
    )  # fmt: skip
    assert len(rows) == 3  # 15 of the 25 sums, 5 a step
    assert {int(row["gts"]) for row in read_jsonl(tmp_path / "1.jsonl")} <= set(range(5))


def test_an_estimator_takes_a_tensor_that_its_trainer_adds(
    lab: Lab, files: Path, tmp_path: Path
) -> None:
    file, steps = files / "entropy_grpo.py", "trainer.total_training_steps=1"
    estimator = f"algorithm.adv_estimator={file}:entropy_grpo"
    (plain,) = lab.train(tmp_path / "plain", steps)
    (mine,) = lab.train(tmp_path / "mine", steps, estimator, f"trainer.class={file}:EntropyTrainer")
    assert mine["critic/advantages/mean"] > plain["critic/advantages/mean"]
    with pytest.raises(AssertionError, match="needs entropys, which the batch does not hold"):
        lab.train(tmp_path / "without_trainer", steps, estimator)
    with pytest.raises(AssertionError, match=r"rollout.n=1: .*:entropy_grpo' compares"):
        lab.train(tmp_path / "alone", steps, estimator, "actor_rollout_ref.rollout.n=1")


def test_a_loss_that_is_a_function_of_a_file(lab: Lab, files: Path, tmp_path: Path) -> None:
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={files}/reinforce_loss.py:reinforce"
    (row,) = lab.train(tmp_path, "trainer.total_training_steps=1", *SMALL, loss)
    assert "actor/pg_loss" in row
    assert "actor/pg_clipfrac" not in row


def test_an_agent_loop_of_two_turns(lab: Lab, files: Path, tmp_path: Path) -> None:
    loops = tmp_path / "loops.yaml"
    loops.write_text(
        f"- {{name: second_thought, _target_: '{files}/my_loops.py:SecondThought', question: 2+2}}"
    )
    agent = "actor_rollout_ref.rollout.agent"
    (row,) = lab.train(
        tmp_path / "run", "trainer.total_training_steps=1", *SMALL, "data.max_response_length=40",
        f"{agent}.agent_loop_config_path={loops}", f"{agent}.default_agent_loop=second_thought",
    )  # fmt: skip
    assert row["num_turns/mean"] == 4


def test_a_retriever_that_is_a_service(files: Path) -> None:
    handler = load_object(f"{files}/word_retriever.py", "WordRetriever", "test")
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = RetrieverClient(f"http://127.0.0.1:{server.server_port}/retrieve", topk=1)

        async def ask() -> list[list[str]]:
            found = await client.search(["river", "lake"])
            await client.close()
            return [[document.title for document in hits] for hits in found]

        assert asyncio.run(ask()) == [["Po"], []]
        server.shutdown()


def test_a_worker_of_two_ranks_has_a_further_method(lab: Lab, files: Path, tmp_path: Path) -> None:
    rows = lab.train(
        tmp_path, "trainer.total_training_steps=1", "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256",
        f"actor_rollout_ref.worker_class={files}/counting.py:CountingWorker",
        f"trainer.class={files}/counting.py:CountingTrainer",
    )  # fmt: skip
    assert rows[0]["counting/tokens"] == rows[0]["perf/total_num_tokens"]
    assert rows[0]["counting/ranks"] == 2


def test_a_sampler_that_is_a_class_of_a_file(lab: Lab, files: Path, tmp_path: Path) -> None:
    """On the module's weights, so that training log-probs are its own, before each update."""
    sampler = f"actor_rollout_ref.rollout.name={files}/plain_sampler.py:PlainSampler"
    rows = lab.train(tmp_path / "mine", f"trainer.total_training_steps={STEPS}", *SMALL, sampler)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    key = "actor_rollout_ref.rollout.enable_prefix_caching"
    with pytest.raises(AssertionError, match=f"{key}=True: takes .*name=native, vllm or sglang, "):
        lab.train(tmp_path / "refused", *SMALL, sampler, f"{key}=True")


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
