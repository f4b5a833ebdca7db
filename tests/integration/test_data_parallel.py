"""Training on two ranks is training on one: the same mini-batches, losses, metrics and weights.

Two processes are started once. Rank 0 first does everything alone, then both do it together, and
what they found out is read by the tests below.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from caldera.config import FSDPConfig, OptimizerConfig, load_config, resolve_for_machine
from caldera.core_algos import LossScale
from caldera.demo.arithmetic import build_model, build_tokenizer
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.engine import local as ranks_module
from caldera.errors import ConfigError
from caldera.protocol import DataProto
from caldera.protocol.balance import micro_batches_by_tokens
from caldera.workers import ActorRolloutRefWorker, CriticWorker
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.timeout(900)  # the first test waits for all that the processes do
P, R = 4, 8
PROMPTS = [4, 3, 1, 2, 2, 4, 3, 1]  # tokens of each row
ANSWERS = [8, 7, 1, 2, 3, 8, 5, 0]
BY_TOKENS = P + R  # tokens of a micro-batch
SHARES = {1: [list(range(8))], 2: [[0, 1, 4, 5], [2, 3, 6, 7]]}  # two mini-batches of four rows

LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode"
ACTOR_TOKENS = [
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BY_TOKENS}",
]
CASES: dict[str, list[str]] = {
    "vanilla, by rows": [],
    "vanilla, by tokens": ACTOR_TOKENS,
    "geo_mean, by rows": [f"{LOSS_MODE}=geo_mean"],
    "geo_mean, by tokens": [f"{LOSS_MODE}=geo_mean", *ACTOR_TOKENS],
    "by sequences, with entropy and KL": [
        f"{AGGREGATION}=seq-mean-token-mean",
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        "actor_rollout_ref.actor.use_kl_loss=True",
        *ACTOR_TOKENS,
    ],
    "two epochs": ["actor_rollout_ref.actor.ppo_epochs=2"],
    "on policy": ["actor_rollout_ref.actor.ppo_mini_batch_size=4", *ACTOR_TOKENS],
    "critic, by rows": [],
    "critic, by tokens": [
        "critic.use_dynamic_bsz=True",
        f"critic.ppo_max_token_len_per_gpu={BY_TOKENS}",
    ],
}
Actor = ActorRolloutRefWorker
Result = dict[str, Any]


def make_batch() -> DataProto:
    """Eight rows with all that an update reads; one has no answer."""
    generator = torch.Generator().manual_seed(4)
    before = torch.arange(P) >= P - torch.tensor(PROMPTS)[:, None]
    mask = (torch.arange(R) < torch.tensor(ANSWERS)[:, None]).long()
    attention = torch.cat([before.long(), mask], 1)
    input_ids = torch.randint(3, 10, (8, P + R), generator=generator)

    def normal(mean: float, spread: float) -> Tensor:
        return mean + spread * torch.randn(8, R, generator=generator)

    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "responses": input_ids[:, P:],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "old_log_probs": normal(-2.5, 0.3),
            "ref_log_prob": normal(-2.5, 0.3),
            "advantages": normal(0, 1),
            "values": normal(0, 1),
            "returns": normal(0, 1),
        }
    )


def share(ranks: int, rank: int) -> DataProto:
    return make_batch().select_idxs(SHARES[ranks][rank])


def make_worker(model: str, kind: str, *overrides: str) -> Actor | CriticWorker:
    config = load_config(
        [
            "data.train_files=unused",
            "data.val_files=unused",
            "data.train_batch_size=4",
            f"data.max_prompt_length={P}",
            f"data.max_response_length={R}",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
            "critic.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.actor.strategy=local",
            "critic.strategy=local",
            *(
                f"{role}.optim.{setting}"
                for role in ("actor_rollout_ref.actor", "critic")
                for setting in ("optimizer=SGD", "lr=0.2", "override_optimizer_config.momentum=0.9")
            ),
            *overrides,
        ]
    )
    resolve_for_machine(config, gpus=0)
    worker: Actor | CriticWorker
    if kind == "critic":
        worker = CriticWorker(config.critic, config.actor_rollout_ref.rollout.n, "cpu")
    else:
        worker = Actor(config.actor_rollout_ref, "actor_rollout", "cpu")
    worker.init_model()
    return worker


def update(worker: Actor | CriticWorker, batch: DataProto) -> dict[str, float]:
    if isinstance(worker, CriticWorker):
        output = worker.update_critic(batch)
    else:
        output = worker.update_actor(batch)
    metrics: dict[str, float] = output.meta_info["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def weights(worker: Actor | CriticWorker) -> dict[str, Tensor]:
    engine = worker.engine if isinstance(worker, CriticWorker) else worker.actor
    return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


# ---------------------------------------------------------------------- what a rank does


def train_cases(model: str, ranks: int, rank: int) -> Result:
    """Every case: (metrics of this rank, new weights)."""
    found = {}
    for case, overrides in CASES.items():
        worker = make_worker(model, case.partition(",")[0], *overrides)
        metrics = update(worker, share(ranks, rank))
        found[case] = {"metrics": metrics, "weights": weights(worker)}
    return found


def resume(model: str, ranks: int, rank: int, folder: Path) -> Result:
    """Go on from a checkpoint: (the next random number, weights after an update)."""
    worker = make_worker(model, "actor")
    worker.load_checkpoint(folder)
    drawn = torch.rand(()).item()
    update(worker, share(ranks, rank))
    return {"drawn": drawn, "weights": weights(worker)}


def save(model: str, ranks: int, rank: int, folder: Path) -> Result:
    """Write a checkpoint after an update, and go on."""
    worker = make_worker(model, "actor")
    update(worker, share(ranks, rank))
    torch.manual_seed(100 + rank)
    worker.save_checkpoint(folder)
    there = sorted(path.name for path in folder.rglob("*"))  # complete for every rank
    drawn = torch.rand(()).item()
    update(worker, share(ranks, rank))
    return {"drawn": drawn, "weights": weights(worker), "files": there}


class PartlyUsed(nn.Module):
    """A model with parameters that only one rank, or none, has a gradient for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model(build_tokenizer(), 0)
        self.rank_0_alone = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.ones(3))

    def get_base_model(self) -> nn.Module:
        return self.inner


def train_odd_model(rank: int) -> Result:
    """A parameter without gradient on some ranks, and a loss that is NaN on one."""
    module = PartlyUsed()
    optim = OptimizerConfig(optimizer="SGD", lr=1.0, weight_decay=0.5)
    engine = LocalEngine(module, torch.device("cpu"), EngineOptions(FSDPConfig(), optim))
    plan = ForwardPlan(("log_probs",), False, 4, None)

    def loss_fn(factor: float) -> Callable[..., Any]:
        def loss_of(
            outputs: Outputs, rows: DataProto, scale: LossScale
        ) -> tuple[Tensor, dict[str, Tensor]]:
            mask = rows.batch["response_mask"]
            loss = scale.aggregate(factor * outputs["log_probs"], mask, "token-mean")
            extra = module.rank_0_alone.sum() if rank == 0 else torch.zeros(())
            return loss + extra, {"loss": loss.detach()}

        return loss_of

    engine.train(share(2, rank), loss_fn(0.1), plan)
    first = [value.detach().clone() for value in module.parameters()]
    metrics = engine.train(share(2, rank), loss_fn(float("nan") if rank == 1 else 0.1), plan)
    return {
        "used": module.rank_0_alone.tolist(),
        "unused": module.unused.tolist(),
        "unmoved": all(map(torch.equal, first, module.parameters())),
        "grad_norm": metrics["grad_norm"].item(),
    }


def differ(model: str, rank: int) -> str:
    """What is said when ranks start from different weights."""
    with pytest.raises(ConfigError) as raised:
        make_worker(model, "critic", f"critic.model.fsdp_config.seed={rank}")
    return str(raised.value)


def run_rank(rank: int, folder: Path) -> None:
    """All that one process does."""
    torch.set_num_threads(1)
    ranks_module.BUCKET_BYTES = 100_000  # so that gradients of 1.5 MB take several messages
    model, one, two = str(folder / "model"), folder / "from_one", folder / "from_two"
    found: Result = {}
    if rank == 0:
        found["alone"] = train_cases(model, 1, 0)
        found["saved alone"] = save(model, 1, 0, one)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2,
        timeout=timedelta(seconds=600),
    )  # fmt: skip
    found["together"] = train_cases(model, 2, rank)
    found["odd"] = train_odd_model(rank)
    found["different"] = differ(model, rank)
    found["one to two"] = resume(model, 2, rank, one)
    found["saved together"] = save(model, 2, rank, two)
    found["two to two"] = resume(model, 2, rank, two)
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if rank == 0:
        found["two to one"] = resume(model, 1, 0, two)
    torch.save(found, folder / f"found_{rank}.pt")


# ---------------------------------------------------------------------- what is found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """What each of the two ranks found out."""
    folder = tmp_path_factory.mktemp("ranks")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, 0).save_pretrained(folder / "model")
    return run_ranks(__file__, 2, folder, "caldera.workers")


def assert_close(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-6, atol=1e-6, msg=name)


def assert_same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(two[name], value) for name, value in one.items())


def test_ranks_have_different_numbers_of_micro_batches() -> None:
    lengths = [sum(row) for row in zip(PROMPTS, ANSWERS, strict=True)]
    parts = [[lengths[row] for row in rows[:2]] for rows in SHARES[2]]
    assert [len(micro_batches_by_tokens(part, BY_TOKENS)) for part in parts] == [2, 1]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(found: list[Result], case: str) -> None:
    alone, together = found[0]["alone"][case], [rank["together"][case] for rank in found]
    assert_same_bits(together[0]["weights"], together[1]["weights"])
    assert_close(alone["weights"], together[0]["weights"])
    means = {name: sum(rank["metrics"][name] for rank in together) / 2 for name in alone["metrics"]}
    assert means == pytest.approx(alone["metrics"], rel=1e-6, abs=1e-6)
    role = "critic" if case.startswith("critic") else "actor"
    assert {f"{role}/grad_norm", f"{role}/lr"} < means.keys()
    assert together[0]["metrics"] != together[1]["metrics"], "each has its share"


def test_cases_differ(found: list[Result]) -> None:
    """What is compared above is not the same thing over and over."""
    vanilla, geo_mean = (found[0]["alone"][f"{name}, by rows"] for name in ("vanilla", "geo_mean"))
    assert vanilla["metrics"] != pytest.approx(geo_mean["metrics"], rel=1e-3)
    assert vanilla["metrics"]["actor/pg_clipfrac"] > 0


def test_a_parameter_that_one_rank_uses(found: list[Result]) -> None:
    """Its gradient is 1 on one rank of two; one that nobody uses is not even decayed."""
    for rank in found:
        assert rank["odd"]["used"] == pytest.approx([1 - 0.5 * 1 - 0.5] * 3)
        assert rank["odd"]["unused"] == [1, 1, 1]


def test_all_ranks_skip_a_step_that_one_cannot_take(found: list[Result]) -> None:
    for rank in found:
        assert rank["odd"]["unmoved"]
        assert rank["odd"]["grad_norm"] != rank["odd"]["grad_norm"], "NaN"


def test_ranks_that_start_from_different_weights(found: list[Result]) -> None:
    for rank in found:
        assert rank["different"].startswith(
            "the 2 ranks hold different weights, of score.weight and 0 other parameters"
        )


def test_files_of_a_checkpoint(found: list[Result]) -> None:
    whole = {"dist_ckpt", ".metadata"}
    described = {"huggingface", "config.json", "tokenizer.json"}
    for rank in found:
        files = set(rank["saved together"]["files"])
        extra = {name for name in files if name.startswith("extra_state")}
        assert extra == {f"extra_state_world_size_2_rank_{rank}.pt" for rank in range(2)}
        assert whole | described <= files
    assert found[0]["saved together"]["drawn"] != found[1]["saved together"]["drawn"]


def test_two_ranks_go_on_where_two_stopped(found: list[Result]) -> None:
    for rank in found:
        assert rank["two to two"]["drawn"] == rank["saved together"]["drawn"]
        assert_same_bits(rank["saved together"]["weights"], rank["two to two"]["weights"])


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("saved alone", "one to two"), ("saved together", "two to one")],
)
def test_another_number_of_ranks_goes_on(found: list[Result], saved: str, resumed: str) -> None:
    expected = found[0][saved]
    for rank in [rank for rank in found if resumed in rank]:
        assert rank[resumed]["drawn"] == expected["drawn"], "the generators of rank 0"
        assert_close(expected["weights"], rank[resumed]["weights"])


if __name__ == "rank":
    run_rank(RANK, FOLDER)  # type: ignore[name-defined]  # noqa: F821  # given by the parent
