"""What ranks do in the tests of offloading: all that a worker does, its models away in between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._flat_param import FlatParamHandle

from caldera.config import load_config, resolve_for_machine
from caldera.demo.arithmetic import build_model, build_tokenizer
from caldera.engine.fsdp2 import Fsdp2Engine
from caldera.protocol import DataProto
from caldera.workers import ActorRolloutRefWorker, CriticWorker

P, R, ROWS = 4, 8, 8
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
Result = dict[str, Any]


def combinations(*keys: str) -> list[tuple[str, ...]]:
    """Every choice of some of the keys, none of them first."""
    return [
        tuple(key for key, chosen in zip(keys, choice, strict=True) if chosen)
        for choice in product((False, True), repeat=len(keys))
    ]


def make_batch() -> DataProto:
    generator = torch.Generator().manual_seed(4)
    attention = torch.ones(ROWS, P + R, dtype=torch.long)
    input_ids = torch.randint(3, 10, (ROWS, P + R), generator=generator)
    kinds = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    numbers = {kind: torch.randn(ROWS, R, generator=generator) for kind in kinds}
    numbers["old_log_probs"] -= 2.5
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "responses": input_ids[:, P:],
            "attention_mask": attention,
            "position_ids": attention.cumsum(1) - 1,
            "response_mask": attention[:, P:],
            **numbers,
        }
    )


def make_worker(
    model: Path, kind: str, overrides: list[str]
) -> ActorRolloutRefWorker | CriticWorker:
    config = load_config(
        [
            "data.train_files=unused",
            "data.val_files=unused",
            "data.train_batch_size=4",
            f"data.max_prompt_length={P}",
            f"data.max_response_length={R}",
            f"trainer.n_gpus_per_node={dist.get_world_size()}",
            f"actor_rollout_ref.model.path={model}",
            f"{ACTOR}.ppo_mini_batch_size=2",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
            f"{ACTOR}.use_kl_loss=True",
            f"{REF}.log_prob_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.n=2",
            "critic.ppo_micro_batch_size_per_gpu=2",
            *(f"{role}.optim.lr=0.001" for role in (ACTOR, "critic")),
            *overrides,
        ]
    )
    resolve_for_machine(config, gpus=0)
    worker: ActorRolloutRefWorker | CriticWorker
    if kind == "critic":
        worker = CriticWorker(config.critic, config.actor_rollout_ref.rollout.n, "cpu")
    else:
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout_ref", "cpu")
    worker.init_model()
    return worker


def trial(model: Path, kind: str, overrides: list[str], folder: Path) -> Result:
    """Inference, weights to the sampler, two updates, a checkpoint, a third update, and that again
    from the checkpoint, by the same worker and by another."""
    worker = make_worker(model, kind, overrides)
    found: Result = {"first": _infer(worker), "curve": [_update(worker) for _ in range(2)]}
    worker.save_checkpoint(folder)
    found["curve"].append(_update(worker))
    found["last"], found["weights"] = _infer(worker), _weights(worker)
    worker.load_checkpoint(folder)
    found["again"] = _update(worker)
    other = make_worker(model, kind, overrides)
    other.load_checkpoint(folder)
    found["resumed"], found["resumed weights"] = _update(other), _weights(other)
    return found


def _rows(engine: Any) -> DataProto:
    share = 4 // engine.dp_size
    start = engine.dp_rank * share
    return make_batch().select_idxs([m + start + i for m in (0, 4) for i in range(share)])


def _infer(worker: ActorRolloutRefWorker | CriticWorker) -> list[torch.Tensor]:
    if isinstance(worker, CriticWorker):
        return [worker.compute_values(_rows(worker.engine)).batch["values"]]
    rows = _rows(worker.actor)
    # The reference goes first: it may be alone on the device before the actor ever was.
    reference = worker.compute_ref_log_prob(rows).batch["ref_log_prob"]
    return [reference, worker.compute_log_prob(rows).batch["old_log_probs"]]


def _update(worker: ActorRolloutRefWorker | CriticWorker) -> dict[str, float]:
    if isinstance(worker, CriticWorker):
        output = worker.update_critic(_rows(worker.engine))
    else:
        output = worker.update_actor(_rows(worker.actor))
    metrics: dict[str, float] = output.meta_info["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def _weights(worker: ActorRolloutRefWorker | CriticWorker) -> dict[str, torch.Tensor]:
    if isinstance(worker, CriticWorker):
        worker.engine.onload()
        found = {name: value.clone() for name, value in worker.engine.export_weights()}
        worker.engine.offload()
        return found
    with worker.weight_sync:  # the sampler's copy
        return {name: value.clone() for name, value in worker.rollout.module.named_parameters()}


@contextmanager
def ranks_meet(rank: int, ranks: int, folder: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=240),
    )  # fmt: skip
    yield
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def moves_are_real() -> Iterator[None]:
    """A CPU has one memory; here what moves gets another place in it, and its old one is spoiled,
    as if it had gone to another device."""
    flat_param_to, move = FlatParamHandle.flat_param_to, Fsdp2Engine._move

    def copy_flat(self: FlatParamHandle, *args: Any, **options: Any) -> None:
        before = self.flat_param.data
        flat_param_to(self, *args, copy=True, **options)
        before.fill_(torch.nan)

    def copy_parts(self: Fsdp2Engine, device: torch.device) -> None:
        move(self, device)
        parts: Any = self.packed.parameters()  # DTensors
        before = [part.to_local() for part in parts]
        self.packed._apply(torch.clone)
        for tensor in before:
            tensor.data.fill_(torch.nan)

    with (
        patch.object(FlatParamHandle, "flat_param_to", copy_flat),
        patch.object(Fsdp2Engine, "_move", copy_parts),
    ):
        yield


def save_model(folder: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, 0).save_pretrained(folder)


def assert_same(found: Result, expected: Result) -> None:
    """To the last bit, and whatever was saved while models were away goes on as if nothing was."""
    for key in ("curve", "again", "resumed"):
        assert found[key] == expected[key], key
    assert found["again"] == found["resumed"] == found["curve"][2]
    for key in ("first", "last"):
        for one, other in zip(found[key], expected[key], strict=True):
            assert torch.equal(one, other), key
    for key in ("weights", "resumed weights"):
        assert found[key].keys() == expected[key].keys()
        for name, value in expected[key].items():
            assert torch.equal(found[key][name], value), name
            assert torch.equal(found[key][name], found["weights"][name]), name
