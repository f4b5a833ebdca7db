"""The engine of PyTorch models: one step of training is the same for every layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from caldera.config import OptimizerConfig
from caldera.core_algos import LossScale
from caldera.engine.base import (
    Engine,
    EngineOptions,
    ForwardPlan,
    FrozenStates,
    LossFn,
    Outputs,
)
from caldera.engine.layout import Layout
from caldera.engine.optim import build_optimizer, build_schedule, step_if_finite
from caldera.engine.packed_model import PackedRows, pack_ends, pack_rows
from caldera.engine.saving import Checkpoint
from caldera.models.flops import Arithmetic
from caldera.models.forward import move, send, send_rows, without_adapter
from caldera.models.loading import exported_weights
from caldera.protocol import DataProto, tensors_of
from caldera.protocol.balance import micro_batches_by_count, micro_batches_by_tokens

logger = logging.getLogger(__name__)


class TrainingEngine(Engine):
    """Packed forward passes, exact gradient accumulation, clipping, a schedule, checkpoints.

    Each rank trains on its rows of a mini-batch, and all take the same step. Nothing in a step
    waits for the device, so that work is queued there while the host prepares the next.
    """

    def __init__(
        self, layout: Layout, arithmetic: Arithmetic, device: torch.device, options: EngineOptions
    ) -> None:
        self.module = layout.packed.inner
        self.arithmetic = arithmetic
        self.version = 0
        self.is_whole = layout.is_whole
        self.dp_rank, self.dp_size = layout.dp_rank, layout.dp_size
        self.is_dp_leader = layout.is_dp_leader
        self.model_parallel_size = layout.model_parallel_size
        self.sequence_parallel_size = layout.sequence.size
        self._layout = layout
        self.device = device
        self._memory = memory = options.memory
        # With the policy it never leaves the host.
        self._offloads_optimizer = memory.optimizer_offload and not memory.offload_policy
        self._grad_clip = options.grad_clip
        self._optimizer: torch.optim.Optimizer | None = None
        if options.optim is not None:
            self._prepare_training(options.optim)
        layout.root.eval()
        layout.check()
        self._checkpoint = Checkpoint(layout, self._optimizer, options.checkpoint)

    def _prepare_training(self, optim: OptimizerConfig) -> None:
        self._optimizer = build_optimizer(self._layout.root.parameters(), optim)
        self._schedule = build_schedule(self._optimizer, optim)

    def infer(self, batch: DataProto, plan: ForwardPlan) -> Outputs:
        root = self._layout.root
        root.eval()
        rows, width = tensors_of(batch)["responses"].shape
        found: Outputs = {}
        with torch.no_grad():
            for indices in self._micro_batches(batch, plan):
                where = send(torch.tensor(indices), self.device)
                outputs = self._forward(self._pack(batch.select_idxs(indices), plan), plan)
                for name, value in outputs.items():  # (b, R)
                    whole = found.setdefault(name, value.new_zeros(rows, width))
                    whole.index_copy_(0, where, value)
        self._rest(plan)
        return {name: value.float().cpu() for name, value in found.items()}

    def train(self, mini_batch: DataProto, loss_fn: LossFn, plan: ForwardPlan) -> dict[str, Tensor]:
        assert self._optimizer is not None, "a frozen engine is not trained"
        self._layout.root.train()
        scale = self._layout.loss_scale(tensors_of(mini_batch)["response_mask"])
        totals: dict[str, Tensor] = {}
        for indices in self._micro_batches(mini_batch, plan):
            rows = mini_batch.select_idxs(indices)
            outputs = self._forward(self._pack(rows, plan), plan)
            own = LossScale.classic(len(indices) / len(mini_batch)) if plan.classic else scale
            loss, metrics = loss_fn(outputs, send_rows(rows, self.device), own)
            loss.backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value.detach()
        self._layout.finish_gradients()
        norm = self._layout.clip(self._grad_clip or float("inf"))
        step_if_finite(self._optimizer, norm)
        self.version += 1
        self._optimizer.zero_grad(set_to_none=True)
        self._layout.root.eval()
        self._rest(plan)
        return {**totals, "grad_norm": norm}

    def frozen_states(self, packed: PackedRows) -> FrozenStates:
        root = self._layout.root
        training = self.module.training
        root.eval()
        with torch.no_grad(), without_adapter(self.module):
            found = root(packed, ())
        root.train(training)
        return FrozenStates(found["hidden"], found["head"])

    def step_schedule(self) -> float:
        rate = float(self._schedule.get_last_lr()[0])
        self._schedule.step()
        return rate

    # ---- weights

    def export_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        return exported_weights(self.module, self._layout.whole, self._layout.tensors(), merged)

    def adapter_weights(self) -> dict[str, Tensor]:
        return {
            name: self._layout.whole(tensor).cpu()
            for name, tensor in self._layout.tensors().items()
            if ".lora_" in name or ".modules_to_save." in name
        }

    def onload(self, optimizer: bool = False) -> None:
        if self._memory.param_offload:
            self._layout.move(self.device)
        if optimizer and self._offloads_optimizer and self._optimizer is not None:
            _move_optimizer(self._optimizer, self.device)

    def offload(self) -> None:
        host = torch.device("cpu")
        if self._memory.param_offload:
            self._layout.move(host)
        if self._offloads_optimizer and self._optimizer is not None:
            _move_optimizer(self._optimizer, host)
        if self.device.type == "cuda" and (
            self._memory.param_offload or self._memory.optimizer_offload
        ):
            torch.cuda.synchronize(self.device)  # so that moved tensors can be read

    # ---- checkpoints

    def save(self, folder: Path, contents: list[str]) -> None:
        schedule = self._schedule.state_dict() if self._optimizer is not None else None
        self._checkpoint.save(folder, contents, schedule, self.version)
        if "hf_model" in contents:
            self._checkpoint.save_hugging_face(folder, self.export_weights())
        if not self._checkpoint.is_asynchronous:
            self._layout.wait()

    def is_saved(self) -> bool:
        return self._checkpoint.is_saved()

    def wait_for_save(self) -> None:
        self._checkpoint.wait()

    def load(self, folder: Path, contents: list[str]) -> None:
        extra = self._checkpoint.load(folder, contents)
        if extra is not None:
            self.version = extra["version"]
            if self._optimizer is not None:
                self._schedule.load_state_dict(extra["lr_scheduler"])
                # The optimiser holds the rate too, and may not have been read back.
                for group, rate in zip(
                    self._optimizer.param_groups, self._schedule.get_last_lr(), strict=True
                ):
                    group["lr"] = rate
        self._layout.check()

    def rest(self) -> None:
        self._layout.rest()

    def _rest(self, plan: ForwardPlan) -> None:
        self.rest()
        if plan.reference is not None:
            plan.reference.rest()

    # ---- one micro-batch

    def _forward(self, packed: PackedRows, plan: ForwardPlan) -> Outputs:
        # The reference goes first, so that its activations are gone before the policy's are kept.
        reference = plan.reference.frozen_states(packed) if plan.reference is not None else None
        found = self._layout.root(packed, plan.outputs, plan.temperature, reference)
        return {name: packed.unpack(found[name]) for name in plan.outputs}

    def _pack(self, rows: DataProto, plan: ForwardPlan) -> PackedRows:
        pack = pack_ends if "scores" in plan.outputs else pack_rows
        return pack(rows, self.device, self._layout.sequence)

    def _micro_batches(self, batch: DataProto, plan: ForwardPlan) -> list[list[int]]:
        if not plan.by_tokens:
            assert plan.micro_batch_size is not None, "the config's check asks for it"
            return micro_batches_by_count(len(batch), plan.micro_batch_size, plan.rows_together)
        assert plan.max_tokens is not None
        most = plan.max_tokens * self._layout.sequence.size
        lengths = tensors_of(batch)["attention_mask"].sum(1).tolist()
        cut = micro_batches_by_tokens(lengths, most, together=plan.rows_together)
        needed = self._layout.least_micro_batches(len(cut))
        if needed == len(cut):
            return cut
        return micro_batches_by_tokens(lengths, most, needed, plan.rows_together)


def _move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = move(value, device)
