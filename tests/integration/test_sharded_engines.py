"""A model that is sharded trains as one that is whole: the same losses, metrics and weights.

Four processes are started once. Rank 0 first does everything alone, then two and four of them do it
together in every layout, and what they found out is read by the tests below.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from caldera.config import load_config, resolve_for_machine
from caldera.demo.arithmetic import build_model, build_tokenizer
from caldera.protocol import DataProto
from caldera.workers import ActorRolloutRefWorker, CriticWorker
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.timeout(900)  # the first test waits for all that the processes do
P, R, ROWS = 4, 8, 8
PROMPTS = [4, 3, 1, 2, 2, 4, 3, 1]  # tokens of each row
ANSWERS = [8, 7, 1, 2, 3, 8, 5, 0]
UPDATES = 3
ACTOR = "actor_rollout_ref.actor"
TOKENS = "ulysses_sequence_parallel_size=2"

Settings = dict[str, str]
LAYOUTS: dict[str, tuple[int, Settings]] = {  # ranks, and what both roles are told
    "fsdp on 2": (2, {"strategy": "fsdp"}),
    "fsdp on 2, parameters apart": (2, {"strategy": "fsdp", "fsdp_config.use_orig_params": "True"}),
    "fsdp2 on 2": (2, {"strategy": "fsdp2"}),
    "fsdp2 on 2, gathered once": (
        2,
        {
            "strategy": "fsdp2",
            "fsdp_config.reshard_after_forward": "False",
            "fsdp_config.forward_prefetch": "True",
            "fsdp_config.wrap_policy.min_num_params": "5000",
        },
    ),
    "fsdp2 on 2, on the host": (2, {"strategy": "fsdp2", "fsdp_config.offload_policy": "True"}),
    "fsdp2, tokens shared by 2": (2, {"strategy": "fsdp2", "ulysses_sequence_parallel_size": "2"}),
    "fsdp, tokens shared by 2": (2, {"strategy": "fsdp", "ulysses_sequence_parallel_size": "2"}),
    "fsdp2, matrices shared by 2": (
        2,
        {"strategy": "fsdp2", "fsdp_config.tensor_parallel_size": "2"},
    ),
    "fsdp2 on 4": (4, {"strategy": "fsdp2"}),
    "fsdp on 2 x 2": (4, {"strategy": "fsdp", "fsdp_config.fsdp_size": "2"}),
    "fsdp2 on 2 x 2": (4, {"strategy": "fsdp2", "fsdp_config.fsdp_size": "2"}),
    "fsdp2 on 2, tokens shared by 2": (
        4,
        {"strategy": "fsdp2", "ulysses_sequence_parallel_size": "2"},
    ),
    "fsdp2 on 2, matrices shared by 2": (
        4,
        {"strategy": "fsdp2", "fsdp_config.tensor_parallel_size": "2"},
    ),
}
ADAM = ("optimizer=AdamW", "lr=0.001", "override_optimizer_config=null")
# Not Adam, which makes large steps of gradients that are nothing but rounding.
DESCENT = ("optimizer=SGD", "lr=0.2", "override_optimizer_config.momentum=0.9")
MORE: dict[str, list[str]] = {  # what a layout is told besides, and rank 0 alone as well
    "": [],
    "LoRA": ["actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4"],
    "Adam": [f"{role}.optim.{s}" for role in (ACTOR, "critic") for s in ADAM],
    "checkpointing": ["actor_rollout_ref.model.enable_activation_offload=True"],
}
Worker = ActorRolloutRefWorker | CriticWorker
Result = dict[Any, Any]


def make_batch() -> DataProto:
    """Eight rows with all that an update reads; one has no answer."""
    generator = torch.Generator().manual_seed(4)
    before = torch.arange(P) >= P - torch.tensor(PROMPTS)[:, None]
    mask = (torch.arange(R) < torch.tensor(ANSWERS)[:, None]).long()
    attention = torch.cat([before.long(), mask], 1)
    input_ids = torch.randint(3, 10, (ROWS, P + R), generator=generator)

    def normal(mean: float, spread: float) -> Tensor:
        return mean + spread * torch.randn(ROWS, R, generator=generator)

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


def make_worker(model: str, kind: str, settings: Settings, more: list[str]) -> Worker:
    def told(role: str, memory: str) -> list[str]:
        return [
            f"{role}.{key}={value}".replace(f"{role}.fsdp_config", memory)
            for key, value in settings.items()
        ]

    config = load_config(
        [
            "data.train_files=unused",
            "data.val_files=unused",
            "data.train_batch_size=4",
            f"data.max_prompt_length={P}",
            f"data.max_response_length={R}",
            f"trainer.n_gpus_per_node={dist.get_world_size() if dist.is_initialized() else 1}",
            f"actor_rollout_ref.model.path={model}",
            f"{ACTOR}.ppo_mini_batch_size=2",
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu={P + R}",
            f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.use_kl_loss=True",
            "actor_rollout_ref.rollout.n=2",
            f"critic.ppo_max_token_len_per_gpu={P + R}",
            *(f"{role}.optim.{setting}" for role in (ACTOR, "critic") for setting in DESCENT),
            *told(ACTOR, f"{ACTOR}.fsdp_config"),
            *told("critic", "critic.model.fsdp_config"),
            *more,
        ]
    )
    resolve_for_machine(config, gpus=0)
    worker: Worker
    if kind == "critic":
        worker = CriticWorker(config.critic, config.actor_rollout_ref.rollout.n, "cpu")
    else:
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout", "cpu")
    worker.init_model()
    return worker


def engine_of(worker: Worker) -> Any:
    return worker.engine if isinstance(worker, CriticWorker) else worker.actor


def own_rows(worker: Worker) -> DataProto:
    """Two mini-batches of four rows are balanced over the ranks."""
    engine = engine_of(worker)
    share = 4 // engine.dp_size
    start = engine.dp_rank * share
    return make_batch().select_idxs([m + start + i for m in (0, 4) for i in range(share)])


def evaluate(worker: Worker) -> Tensor:
    """Log-probs or values of this rank's rows, and where they belong."""
    rows = own_rows(worker)
    if isinstance(worker, CriticWorker):
        return worker.compute_values(rows).batch["values"]
    return worker.compute_log_prob(rows).batch["old_log_probs"]


def update(worker: Worker) -> dict[str, float]:
    rows = own_rows(worker)
    if isinstance(worker, CriticWorker):
        output = worker.update_critic(rows)
    else:
        output = worker.update_actor(rows)
    metrics: dict[str, float] = output.meta_info["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def train(model: str, kind: str, settings: Settings, more: list[str]) -> Result:
    worker = make_worker(model, kind, settings, more)
    engine = engine_of(worker)
    first = evaluate(worker)
    curve = [update(worker) for _ in range(UPDATES)]
    parameters = [p for p in engine.root.parameters()]
    return {
        "dp_rank": engine.dp_rank,
        "is_dp_leader": engine.is_dp_leader,
        "first": first,
        "curve": curve,
        "last": evaluate(worker),
        "weights": {name: tensor.clone() for name, tensor in engine.export_weights()},
        "held": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
    }


@contextmanager
def world(name: str, rank: int, ranks: int, folder: Path) -> Iterator[None]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / name}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=600),
    )  # fmt: skip
    yield
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def run_rank(rank: int, folder: Path, only: str | None) -> None:
    """All that one process does."""
    torch.set_num_threads(1)
    model = str(folder / "model")
    found: Result = {}
    kinds = ("actor", "critic")
    if rank == 0:
        for more, overrides in MORE.items():
            for kind in kinds:
                found["alone", kind, more] = train(model, kind, {}, overrides)
    for ranks in (2, 4):
        if rank >= ranks:
            continue
        with world(f"meeting_{ranks}", rank, ranks, folder):
            for name, (size, settings) in LAYOUTS.items():
                if size != ranks or (only and only not in name):
                    continue
                for kind in kinds:
                    for more in extras(name):
                        found[name, kind, more] = train(model, kind, settings, MORE[more])
    torch.save(found, folder / f"found_{rank}.pt")


def extras(name: str) -> list[str]:
    """What else a layout is tried with."""
    return list(MORE) if name in ("fsdp on 2", "fsdp2 on 2") else [""]


# ---------------------------------------------------------------------- what is found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """What each of the ranks found out."""
    folder = tmp_path_factory.mktemp("ranks")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, 0).save_pretrained(folder / "model")
    return run_ranks(__file__, 4, folder, "caldera.workers", ONLY=os.environ.get("ONLY"))


CASES = [(n, kind, more) for n in LAYOUTS for kind in ("actor", "critic") for more in extras(n)]


@pytest.mark.parametrize(("name", "kind", "more"), CASES)
def test_a_sharded_model_trains_as_a_whole_one(
    found: list[Result], name: str, kind: str, more: str
) -> None:
    alone = found[0]["alone", kind, more]
    together = [rank[name, kind, more] for rank in found[: LAYOUTS[name][0]]]
    speakers = [rank for rank in together if rank["is_dp_leader"]]
    assert sorted(rank["dp_rank"] for rank in speakers) == list(range(len(speakers)))
    for step, expected in enumerate(alone["curve"]):
        curves = [rank["curve"][step] for rank in speakers]
        means = {key: sum(c[key] for c in curves) / len(curves) for key in expected}
        assert means == pytest.approx(expected, rel=1e-5, abs=1e-5), f"step {step}"
    for rank in together:
        assert rank["weights"].keys() == alone["weights"].keys()
        for key, value in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][key], value, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize(("name", "kind", "more"), CASES)
def test_a_sharded_model_says_the_same(
    found: list[Result], name: str, kind: str, more: str
) -> None:
    """Before training to rounding, afterwards as closely as the weights agree."""
    alone = found[0]["alone", kind, more]
    for rank in found[: LAYOUTS[name][0]]:
        own = rank[name, kind, more]
        share = len(own["first"]) // 2
        start = own["dp_rank"] * share
        rows = [m + start + i for m in (0, 4) for i in range(share)]
        torch.testing.assert_close(own["first"], alone["first"][rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own["last"], alone["last"][rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_its_part(found: list[Result], name: str) -> None:
    ranks, settings = LAYOUTS[name]
    parts = int(settings.get("fsdp_config.fsdp_size", ranks))
    held = [rank[name, "actor", ""]["held"] for rank in found[:ranks]]
    whole = found[0]["alone", "actor", ""]["held"]
    if "fsdp_config.tensor_parallel_size" in settings:
        assert max(held) < whole * 0.8
    else:
        assert max(held) < whole / parts * 1.1


def test_the_losses_are_not_all_the_same(found: list[Result]) -> None:
    curve = found[0]["alone", "actor", ""]["curve"]
    assert curve[0]["actor/pg_loss"] != pytest.approx(curve[-1]["actor/pg_loss"], rel=1e-3)


if __name__ == "rank":
    run_rank(RANK, FOLDER, ONLY)  # type: ignore[name-defined]  # noqa: F821  # given by the parent
