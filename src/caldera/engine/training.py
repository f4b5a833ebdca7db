"""The engine of PyTorch models: one step of training is the same however the model is laid out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from caldera.core_algos import LossScale
from caldera.engine.base import Engine, EngineOptions, ForwardPlan, FrozenStates, LossFn, Outputs
from caldera.engine.optim import build_optimizer, build_schedule, step_if_finite
from caldera.engine.packed_model import PackedModel, PackedRows, pack_ends, pack_rows
from caldera.engine.saving import Checkpoint
from caldera.models.attention import PackedSequences
from caldera.models.exact_norm import in_exactness
from caldera.models.flops import Arithmetic
from caldera.models.forward import decoder_layers, move, send, send_rows, without_adapter
from caldera.models.loading import DTYPES, enable_checkpointing, exported_weights
from caldera.models.ulysses import ALONE, SequenceGroup, SharedSequences
from caldera.protocol import DataProto, tensors_of


class TrainingEngine(Engine):
    """Packed forward passes, exact gradient accumulation, clipping, a schedule, checkpoints.

    Each rank trains on its rows of a mini-batch, and all take the same step. Nothing in a step
    waits for the device, so that work is queued there while the host prepares the next. Subclasses
    lay the model out on the ranks.
    """

    root: nn.Module
    """The module to call: the packed model, or its wrapper."""
    _sequence: SequenceGroup = ALONE

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        options: EngineOptions,
        autocast: torch.dtype | None = None,
    ) -> None:
        """`autocast`: compute in another precision than that of the parameters."""
        self.module = module
        self.arithmetic = Arithmetic.of(module)
        self.device = device
        self.sequence_parallel_size = self._sequence.size
        self._memory = memory = options.memory
        # With the policy it never leaves the host.
        self._offloads_optimizer = memory.optimizer_offload and not memory.offload_policy
        self._grad_clip = options.grad_clip or float("inf")
        self._cut_matrices()
        _prepare(module, options)
        self.packed = PackedModel(module, autocast, options.activation_offload)
        self.root = self._lay_out(options)
        self._optimizer: torch.optim.Optimizer | None = None
        if options.optim is not None:
            self._optimizer = build_optimizer(self.root.parameters(), options.optim)
            self._schedule = build_schedule(self._optimizer, options.optim)
        self.root.eval()
        self._check()
        self._checkpoint = Checkpoint(self.root, module, self._optimizer, options.checkpoint)

    # ---- how the model lies on the ranks

    def _cut_matrices(self) -> None:
        """Before anything else is done to the module: cut its matrices among ranks."""

    @abstractmethod
    def _lay_out(self, options: EngineOptions) -> nn.Module:
        """Bring the packed model to the device, or this rank's part of it; returns the root."""

    @abstractmethod
    def _finish_gradients(self) -> None:
        """After the last micro-batch: give every rank the gradients of all."""

    @abstractmethod
    def _clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to this norm; returns the norm of all that they had."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their Hugging Face (or peft) names, perhaps as shards."""

    @abstractmethod
    def _whole(self, tensor: Tensor) -> Tensor:
        """All of what may be a shard; every rank must ask for the same tensors in one order."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Bring the parameters to a device."""

    def _check(self) -> None:
        """Complain if ranks that should hold the same weights do not."""

    # ---- passes

    def infer(self, batch: DataProto, plan: ForwardPlan) -> Outputs:
        self.root.eval()
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
        self.root.train()
        scale = self._loss_scale(tensors_of(mini_batch)["response_mask"])
        totals: dict[str, Tensor] = {}
        for indices in self._micro_batches(mini_batch, plan):
            rows = mini_batch.select_idxs(indices)
            outputs = self._forward(self._pack(rows, plan), plan)
            own = LossScale.classic(len(indices) / len(mini_batch)) if plan.classic else scale
            loss, metrics = loss_fn(outputs, send_rows(rows, self.device), own)
            loss.backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value.detach()
        self._finish_gradients()
        norm = self._clip(self._grad_clip)
        step_if_finite(self._optimizer, norm)
        self.version += 1
        self._optimizer.zero_grad(set_to_none=True)
        self.root.eval()
        self._rest(plan)
        return {**totals, "grad_norm": norm}

    def frozen_states(self, packed: PackedRows) -> FrozenStates:
        training = self.module.training
        self.root.eval()
        with torch.no_grad(), without_adapter(self.module):
            found = self.root(packed, ())
        self.root.train(training)
        return FrozenStates(found["hidden"], found["head"])

    def step_schedule(self) -> float:
        assert self._schedule is not None, "a frozen engine is not trained"
        rate = float(self._schedule.get_last_lr()[0])
        self._schedule.step()
        return rate

    def _rest(self, plan: ForwardPlan) -> None:
        self.rest()
        if plan.reference is not None:
            plan.reference.rest()

    def _forward(self, packed: PackedRows, plan: ForwardPlan) -> Outputs:
        # The reference goes first, so that its activations are gone before the policy's are kept.
        reference = plan.reference.frozen_states(packed) if plan.reference is not None else None
        found = self.root(packed, plan.outputs, plan.temperature, reference)
        return {name: packed.unpack(found[name]) for name in plan.outputs}

    def _pack(self, rows: DataProto, plan: ForwardPlan) -> PackedRows:
        pack = pack_ends if "scores" in plan.outputs else pack_rows
        return pack(rows, self.device, self._sequence)

    # ---- weights

    def export_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        return exported_weights(self.module, self._whole, self._tensors(), merged)

    def adapter_weights(self) -> dict[str, Tensor]:
        return {
            name: self._whole(tensor).cpu()
            for name, tensor in self._tensors().items()
            if ".lora_" in name or ".modules_to_save." in name
        }

    def onload(self, optimizer: bool = False) -> None:
        if self._memory.param_offload:
            self._move(self.device)
        if optimizer:
            self._move_optimizer(self.device)

    def offload(self) -> None:
        host = torch.device("cpu")
        if self._memory.param_offload:
            self._move(host)
        self._move_optimizer(host)
        if self.device.type == "cuda" and (
            self._memory.param_offload or self._memory.optimizer_offload
        ):
            torch.cuda.synchronize(self.device)  # so that moved tensors can be read

    def _move_optimizer(self, device: torch.device) -> None:
        if not self._offloads_optimizer or self._optimizer is None:
            return
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = move(value, device)

    def load(self, folder: Path, contents: list[str]) -> None:
        super().load(folder, contents)
        self._check()

    def _apply_rate(self) -> None:
        assert self._optimizer is not None and self._schedule is not None
        rates = self._schedule.get_last_lr()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def compute_dtype(options: EngineOptions) -> torch.dtype | None:
    """The precision to compute in, where it is not that of the parameters."""
    memory = options.memory
    compute = DTYPES[memory.dtype or memory.model_dtype]
    return None if compute == DTYPES[memory.model_dtype] else compute


# ---- What is done to a module before it is laid out

COMPILED_CONTEXTS = (PackedSequences, SharedSequences)
"""Forward passes with these are training's. Samplers that use the same module bring others."""


def _prepare(module: nn.Module, options: EngineOptions) -> None:
    """Freeze, checkpoint and compile as the options say. All layers share the compiled code."""
    if options.optim is None:
        module.requires_grad_(False)
    if options.gradient_checkpointing:
        enable_checkpointing(module)
    if options.compiles:
        for layer in decoder_layers(module):
            layer.forward = _compiled_for_training(layer.forward)


def _compiled_for_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(forward, dynamic=True)

    def choose(*args: Any, **kwargs: Any) -> Any:
        is_training = isinstance(kwargs.get("context"), COMPILED_CONTEXTS) and not in_exactness()
        return (compiled if is_training else forward)(*args, **kwargs)

    return choose
