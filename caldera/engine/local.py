"""The engine that has the whole model on one device, CPU or GPU, of each rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from caldera.config import FSDPConfig, OptimizerConfig
from caldera.core_algos import LossScale
from caldera.data import micro_batches_by_count, micro_batches_by_tokens
from caldera.engine.base import ENGINES, Engine, ForwardPlan, LossFn, Outputs
from caldera.engine.optim import build_optimizer, build_schedule
from caldera.engine.packing import PackedRows, pack_ends, pack_rows
from caldera.engine.ranks import Ranks
from caldera.engine.state_files import (
    WHOLE,
    extra_file,
    read_extra,
    restore,
    restore_rng,
    rng_state,
)
from caldera.models.forward import (
    hidden_states,
    language_head,
    value_scores,
    without_adapter,
)
from caldera.models.head import full_kl, head_outputs
from caldera.models.loading import DTYPES, exported_weights, save_pretrained
from caldera.protocol import DataProto, tensors_of

logger = logging.getLogger(__name__)


@ENGINES.register("local")
class LocalEngine(Engine):
    """Packed forward passes, exact gradient accumulation, clipping, a schedule, checkpoints.

    On several ranks each trains on its rows of a mini-batch, and all take the same step.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        memory: FSDPConfig,
        optim: OptimizerConfig | None,
        grad_clip: float = 0.0,
    ) -> None:
        """Without `optim` the model is frozen."""
        self.module = module.to(device)
        self.version = 0
        self._device = device
        self._memory = memory
        self._grad_clip = grad_clip
        compute = DTYPES[memory.dtype or memory.model_dtype]
        self._autocast_dtype = None if compute == DTYPES[memory.model_dtype] else compute
        self._optimizer = None
        if optim is None:
            module.requires_grad_(False)
        else:
            self._optimizer = build_optimizer(module.parameters(), optim)
            self._schedule = build_schedule(self._optimizer, optim)
        module.eval()
        self._ranks = Ranks(device)
        self.dp_rank, self.dp_size = self._ranks.rank, self._ranks.size
        self._ranks.check_alike(module)

    def infer(self, batch: DataProto, plan: ForwardPlan) -> Outputs:
        self.module.eval()
        rows, width = tensors_of(batch)["responses"].shape
        results: Outputs = {name: torch.zeros(rows, width) for name in plan.outputs}
        pack = pack_ends if "scores" in plan.outputs else pack_rows
        with torch.no_grad():
            for indices in _micro_batches(batch, plan):
                outputs = self._forward(pack(batch.select_idxs(indices), self._device), plan)
                for name, value in outputs.items():
                    results[name][indices] = value.cpu()
        return results

    def train(self, mini_batch: DataProto, loss_fn: LossFn, plan: ForwardPlan) -> dict[str, float]:
        assert self._optimizer is not None, "a frozen engine is not trained"
        self.module.train()
        self._optimizer.zero_grad(set_to_none=True)
        scale = self._ranks.loss_scale(tensors_of(mini_batch)["response_mask"])
        totals: dict[str, Tensor] = {}
        for indices in _micro_batches(mini_batch, plan):
            rows = mini_batch.select_idxs(indices).to(self._device)
            outputs = self._forward(pack_rows(rows, self._device), plan)
            own = LossScale.classic(len(indices) / len(mini_batch)) if plan.classic else scale
            loss, metrics = loss_fn(outputs, rows, own)
            loss.backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value.detach()
        self._ranks.average_gradients(self.module)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._grad_clip or float("inf"))
        if torch.isfinite(norm):
            self._optimizer.step()
            self.version += 1
        else:
            logger.warning("the gradient norm is %s: this optimiser step is skipped", norm.item())
        self._optimizer.zero_grad(set_to_none=True)
        self.module.eval()
        return {name: value.item() for name, value in totals.items()} | {"grad_norm": norm.item()}

    def step_schedule(self) -> float:
        rate = float(self._schedule.get_last_lr()[0])
        self._schedule.step()
        return rate

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return exported_weights(self.module)

    def save(self, folder: Path, contents: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.dp_rank == 0:
            self._save_whole(folder, contents)
        if "extra" in contents:
            extra = {
                "lr_scheduler": self._schedule.state_dict() if self._optimizer else None,
                "rng": rng_state(),
                "version": self.version,
            }
            torch.save(extra, extra_file(folder, self.dp_rank, self.dp_size))
        self._ranks.wait()

    def _save_whole(self, folder: Path, contents: list[str]) -> None:
        if "model" in contents:
            torch.save(self.module.state_dict(), folder / f"model_{WHOLE}")
        if "optimizer" in contents and self._optimizer is not None:
            torch.save(self._optimizer.state_dict(), folder / f"optim_{WHOLE}")
        if "hf_model" in contents:
            save_pretrained(self.module, folder / "huggingface")
        layout = {"FSDP_version": 1, "world_size": 1}  # one shard, under the names of a sharded one
        (folder / "fsdp_config.json").write_text(json.dumps(layout))

    def load(self, folder: Path, contents: list[str]) -> None:
        if "model" in contents:
            restore(self.module, folder / f"model_{WHOLE}")
        if "optimizer" in contents and self._optimizer is not None:
            restore(self._optimizer, folder / f"optim_{WHOLE}")
        if "extra" in contents:
            extra = read_extra(folder, self.dp_rank, self.dp_size)
            if self._optimizer is not None:
                self._schedule.load_state_dict(extra["lr_scheduler"])
                # The optimiser holds the rate too, and may not have been read back.
                for group, rate in zip(
                    self._optimizer.param_groups, self._schedule.get_last_lr(), strict=True
                ):
                    group["lr"] = rate
            self.version = extra["version"]
            restore_rng(extra["rng"])
        self._ranks.check_alike(self.module)

    def onload(self, optimizer: bool = False) -> None:
        if self._memory.param_offload:
            self.module.to(self._device)
        if optimizer and self._memory.optimizer_offload and self._optimizer is not None:
            _move_optimizer(self._optimizer, self._device)

    def offload(self) -> None:
        if self._memory.param_offload:
            self.module.to("cpu")
        if self._memory.optimizer_offload and self._optimizer is not None:
            _move_optimizer(self._optimizer, torch.device("cpu"))

    def frozen_states(self, packed: PackedRows) -> tuple[Tensor, Tensor]:
        training = self.module.training
        self.module.eval()
        with torch.no_grad(), without_adapter(self.module):
            hidden = self._hidden(packed)
        self.module.train(training)
        return hidden, language_head(self.module).detach().to(hidden.dtype)

    def _forward(self, packed: PackedRows, plan: ForwardPlan) -> Outputs:
        # The reference goes first, so that its activations are gone before the policy's are kept.
        reference = plan.reference.frozen_states(packed) if plan.reference is not None else None
        hidden = self._hidden(packed)  # (N, H)
        found: Outputs = {}
        if plan.outputs[0] in ("values", "scores"):
            with self._precision():
                found[plan.outputs[0]] = value_scores(self.module, hidden)
        else:
            weight = language_head(self.module).to(hidden.dtype)
            told = head_outputs(hidden, weight, packed.labels, plan.temperature, plan.outputs)
            found.update(told.items())
            if reference is not None:
                found["full_kl"] = full_kl(hidden, weight, *reference, plan.temperature)
        return {name: packed.unpack(value) for name, value in found.items()}

    def _hidden(self, packed: PackedRows) -> Tensor:
        """Hidden states (N, H) of the tokens that predict: those before the response's."""
        with self._precision():
            hidden = hidden_states(
                self.module, packed.input_ids, packed.sequences.position_ids, packed.sequences
            )  # (T, H)
        hidden = hidden.index_select(0, packed.predictors)
        # Under autocast, the last norm has promoted its output.
        return hidden if self._autocast_dtype is None else hidden.to(self._autocast_dtype)

    def _precision(self) -> AbstractContextManager[None]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype)


def _micro_batches(batch: DataProto, plan: ForwardPlan) -> list[list[int]]:
    if not plan.by_tokens:
        assert plan.micro_batch_size is not None, "the config's check asks for it"
        return micro_batches_by_count(len(batch), plan.micro_batch_size)
    assert plan.max_tokens is not None
    lengths = tensors_of(batch)["attention_mask"].sum(1).tolist()
    return micro_batches_by_tokens(lengths, plan.max_tokens)


def _move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = value.to(device)
