"""The engine `megatron`: Megatron's layers, and its schedule of pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from caldera.core_algos import LossScale
from caldera.engine.base import (
    Engine,
    EngineOptions,
    ForwardPlan,
    FrozenStates,
    LossFn,
    Outputs,
)
from caldera.engine.megatron.checkpoint import MegatronCheckpoint
from caldera.engine.megatron.cpu import stand_ins
from caldera.engine.megatron.groups import Places, arrange
from caldera.engine.megatron.optim import Optimizer, Parking
from caldera.engine.megatron.shape import transformer_config
from caldera.engine.megatron.stage import Stage, find_outputs
from caldera.engine.megatron.weights import Weights, find_pieces
from caldera.engine.packed_model import PackedRows, pack_ends, pack_rows
from caldera.errors import UnsupportedError
from caldera.models.flops import Arithmetic
from caldera.models.forward import base_module, send, send_rows
from caldera.models.loading import DTYPES
from caldera.models.pretrained import WeightSource
from caldera.protocol import DataProto, tensors_of

Told = TypeVar("Told")
Batches = list[list[int] | None]


def train_all(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[[int, Tensor], tuple[Tensor, Told]],
) -> list[Told]:
    """Gradients of the sum of the losses, averaged over the ranks that have different tokens.

    `finish` makes a loss of the hidden states of the numbered micro-batch, on the last stage, where
    alone something comes back: what it tells besides the loss, of each micro-batch in order.
    """

    def loss(number: int, hidden: Tensor) -> tuple[Tensor, Told]:
        found, told = finish(number, hidden)
        # Megatron divides by the number of micro-batches, and multiplies by that of the ranks that
        # share their tokens.
        return found * (len(batches) / places.sequence.size), told

    return _run(stages, batches, places, loss, forward_only=False)


def infer_all(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[[int, Tensor], Told],
) -> list[Told]:
    """What `finish` makes of each micro-batch's hidden states, on the last stage."""

    def outputs(number: int, hidden: Tensor, non_loss_data: bool) -> Told:
        return finish(number, hidden)

    return _run(stages, batches, places, outputs, forward_only=True, collect_non_loss_data=True)


def _run(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[..., Any],
    **options: bool,
) -> list[Any]:
    def forward(numbered: Iterator[tuple[int, PackedRows]], stage: nn.Module) -> tuple[Any, Any]:
        number, packed = next(numbered)
        hidden = stage(packed.input_ids, packed.position_ids, packed.context)
        return hidden, partial(finish, number)

    virtual = places.virtual_stages if places.virtual_stages > 1 else None
    run = get_forward_backward_func(pp_size=places.pp_size, vp_size=virtual)
    numbered = [iter(list(enumerate(batches))) for _ in stages]
    found: list[Any] = run(
        forward_step_func=forward,
        data_iterator=numbered if virtual else numbered[0],
        model=stages if virtual else stages[0],
        num_microbatches=len(batches),
        seq_length=1,  # told by each sender: micro-batches are of different lengths
        micro_batch_size=1,
        **options,
    )
    return found


class MegatronEngine(Engine):
    """Each rank holds some stages of the model, and of their matrices some rows or columns."""

    is_whole = False

    def __init__(
        self, module: nn.Module, source: WeightSource, device: torch.device, options: EngineOptions
    ) -> None:
        """`module` has no values; it has the model's config and the names of its tensors."""
        assert options.megatron is not None, "the worker hands over the role's megatron keys"
        model = base_module(module)
        if model is not module:
            raise UnsupportedError("strategy=megatron with a LoRA adapter: strategy=fsdp2 can")
        self.module = module
        self.device = device
        self.arithmetic = Arithmetic.of(module)
        self._megatron = options.megatron
        default = "bfloat16" if device.type == "cuda" else "float32"
        self._dtype = DTYPES[options.megatron.dtype or default]
        with stand_ins(device):
            self.places = places = arrange(options.megatron)
            self._config = transformer_config(model.config, options, device, self._dtype)
            self._stages = [
                Stage(self._config, model, places, number).to(device)
                for number in range(places.virtual_stages)
            ]
        self.dp_rank, self.dp_size = places.dp_rank, places.dp_size
        self.is_dp_leader = places.is_dp_leader
        self.model_parallel_size = places.model_parallel_size
        self.sequence_parallel_size = places.sequence.size
        self.weights = Weights(find_pieces(self._stages, model, places), model, places)
        self.weights.fill(source)
        self.optimizer: Optimizer | None = None
        self._wrapped: list[nn.Module] = list(self._stages)
        self._parameters, self._gradients, self._state = Parking(), Parking(), Parking()
        if options.optim is None:
            for stage in self._stages:
                stage.requires_grad_(False)
        else:
            with stand_ins(device):
                self._prepare_training(options)
        for stage in self._wrapped:
            stage.eval()
        self._checkpoint = MegatronCheckpoint(
            module, self.weights, self.optimizer, places, options.checkpoint
        )

    def _prepare_training(self, options: EngineOptions) -> None:
        assert options.optim is not None
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self._megatron.use_distributed_optimizer,
        )
        wrapped = [
            DistributedDataParallel(self._config, ddp, stage, disable_bucketing=number > 0)
            for number, stage in enumerate(self._stages)
        ]
        self._config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = Optimizer(
            wrapped, options.optim, self._megatron, self._dtype, options.grad_clip
        )
        self._wrapped = list(wrapped)
        self._schedule = self.optimizer.schedule

    # ---- passes

    def infer(self, batch: DataProto, plan: ForwardPlan) -> Outputs:
        self._check(plan)
        batches, packed = self._packed(batch, plan)

        def finish(number: int, hidden: Tensor) -> Outputs:
            return self._outputs(hidden, packed[number], plan)

        with stand_ins(self.device), torch.no_grad():
            told = infer_all(self._wrapped, packed, self.places, finish)
        width = tensors_of(batch)["responses"].shape[1]
        found: Outputs = {}
        for name in plan.outputs:
            whole = torch.zeros(len(batch), width, device=self.device)
            for one, outputs in zip(batches, told, strict=False):  # other ranks have none
                if one is not None:
                    where = send(torch.tensor(one), self.device)
                    whole.index_copy_(0, where, outputs[name].float())
            found[name] = self._from_last_stage(whole).cpu()
        return found

    def train(self, mini_batch: DataProto, loss_fn: LossFn, plan: ForwardPlan) -> dict[str, Tensor]:
        assert self.optimizer is not None, "a frozen engine is not trained"
        self._check(plan)
        scale = self._loss_scale(tensors_of(mini_batch)["response_mask"])
        batches, packed = self._packed(mini_batch, plan)

        def finish(number: int, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            one = batches[number]
            outputs = self._outputs(hidden, packed[number], plan)
            if one is None:
                return sum((value.sum() * 0 for value in outputs.values()), torch.zeros(())), {}
            share = len(one) / len(mini_batch)
            own = LossScale.classic(share) if plan.classic else scale
            return loss_fn(outputs, send_rows(mini_batch.select_idxs(one), self.device), own)

        for stage in self._wrapped:
            stage.train()
        with stand_ins(self.device):
            told = train_all(self._wrapped, packed, self.places, finish)
            norm = self.optimizer.step()
        self.version += 1
        for stage in self._wrapped:
            stage.eval()
        totals = self._summed(told)
        return {**totals, "grad_norm": torch.tensor(norm, device=self.device)}

    def _outputs(self, hidden: Tensor, packed: PackedRows, plan: ForwardPlan) -> Outputs:
        words = int(base_module(self.module).config.vocab_size)
        return find_outputs(self._stages[-1], hidden, packed, plan, self.places, words)

    def _pack(self, rows: DataProto, plan: ForwardPlan) -> PackedRows:
        """Each context-parallel rank gets a run of a multiple of the ranks that cut it further."""
        multiple = self.places.tp_size if self._config.sequence_parallel else 1
        gather = pack_ends if "scores" in plan.outputs else pack_rows
        return gather(rows, self.device, self.places.sequence, multiple)

    def _least_micro_batches(self, own: int) -> int:
        """As many on every rank; interleaved stages take a multiple of the stages."""
        multiple = self.places.pp_size if self.places.virtual_stages > 1 else 1
        return -(-super()._least_micro_batches(own) // multiple) * multiple

    def _packed(self, batch: DataProto, plan: ForwardPlan) -> tuple[Batches, list[PackedRows]]:
        """The rows of each micro-batch. None: one that makes up the number, of rows of another."""
        parts = self._micro_batches(batch, plan)
        missing = self._least_micro_batches(len(parts)) - len(parts)
        shortest = int(tensors_of(batch)["attention_mask"].sum(1).argmin())
        batches = [*parts, *[None] * missing]
        rows = (batch.select_idxs(part or [shortest]) for part in batches)
        return batches, [self._pack(each, plan) for each in rows]

    def _check(self, plan: ForwardPlan) -> None:
        if "full_kl" in plan.outputs:
            raise UnsupportedError(
                "strategy=megatron: kl_loss_type=full needs whole distributions of policy and "
                "reference; strategy=fsdp2 can"
            )

    def _from_last_stage(self, tensor: Tensor) -> Tensor:
        if self.places.pp_size > 1:
            last = self.places.pp_size - 1
            dist.broadcast(tensor, group=self.places.pp_group, group_src=last)
        return tensor

    def _summed(self, told: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The metrics of all micro-batches, on every stage."""
        totals: dict[str, Tensor] = {}
        for metrics in told:
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value.detach()
        if self.places.pp_size == 1:
            return totals
        names = [list(totals)]
        last = self.places.pp_size - 1
        dist.broadcast_object_list(names, group=self.places.pp_group, group_src=last)
        values = torch.zeros(len(names[0]), dtype=torch.float64, device=self.device)
        if totals:
            values.copy_(torch.stack([value.double() for value in totals.values()]))
        spread = self._from_last_stage(values).float()
        return dict(zip(names[0], spread, strict=True))

    def frozen_states(self, packed: PackedRows) -> FrozenStates:
        raise UnsupportedError(
            "strategy=megatron: a reference for kl_loss_type=full takes strategy=fsdp2 or local"
        )

    def step_schedule(self) -> float:
        assert self.optimizer is not None, "a frozen engine is not trained"
        return self.optimizer.advance()

    # ---- weights and memory

    def export_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self.weights.export()  # there are no adapters

    def adapter_weights(self) -> dict[str, Tensor]:
        return {}

    def onload(self, optimizer: bool = False) -> None:
        self._parameters.fetch()
        if optimizer:
            self._gradients.fetch()
            self._state.fetch()

    def offload(self) -> None:
        if self._megatron.param_offload:
            self._parameters.park(p.data for stage in self._stages for p in stage.parameters())
        if self.optimizer is None:
            return
        if self._megatron.grad_offload:  # between updates they are zero
            self._gradients.park(
                (b.grad_data for stage in self._wrapped for b in _buffers(stage)), keeps=False
            )
        if self._megatron.optimizer_offload:
            self._state.park(self.optimizer.tensors())

    def _apply_rate(self) -> None:
        assert self.optimizer is not None, "a schedule has its optimiser"
        self.optimizer.apply_rate()


def _buffers(stage: nn.Module) -> list[Any]:
    """Megatron's flat memory of gradients, experts' last."""
    assert isinstance(stage, DistributedDataParallel)
    return [*stage.buffers, *stage.expert_parallel_buffers]
