"""Megatron's optimiser under our schedule, and its state parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optim
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from caldera.config import OptimizerConfig
from caldera.config.megatron import MegatronConfig
from caldera.engine.optim import build_decay
from caldera.errors import ConfigError, UnsupportedError

KINDS = {"adam": "adam", "AdamW": "adam", "sgd": "sgd", "SGD": "sgd"}
"""Names of optimisers, Megatron's and torch's. Megatron's Adam decays weights as AdamW does."""
EXTRA = {"adam": {"eps": "adam_eps"}, "sgd": {"momentum": "sgd_momentum"}}
"""Further arguments of these, and what Megatron calls them."""


class Optimizer:
    """One optimiser step over all ranks, and the learning rate of each training step."""

    def __init__(
        self,
        stages: list[DistributedDataParallel],
        config: OptimizerConfig,
        megatron: MegatronConfig,
        dtype: torch.dtype,
        grad_clip: float,
    ) -> None:
        told = _megatron_config(config, megatron, dtype)
        # Without overrides everything is decayed, norms and biases too, as in the other engines.
        self.inner = megatron_optim.get_megatron_optimizer(told, stages, config_overrides={})
        self._stages = stages
        self._grad_clip = grad_clip or math.inf
        self._bearer = torch.optim.SGD([torch.zeros(1)], lr=config.lr)  # schedules want a torch one
        self.schedule = build_decay(self._bearer, config)
        self.apply_rate()

    def step(self) -> float:
        """Take a step, unless the gradient norm is infinite or no number; returns the norm."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if math.isfinite(norm):
            for part in self.inner.chained_optimizers:
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, self._grad_clip, norm)
            self.inner.step_with_ready_grads()
        self.clear()
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self.inner.zero_grad()

    def advance(self) -> float:
        """Go to the next training step's learning rate; returns the one just used."""
        rate = float(self.schedule.get_last_lr()[0])
        self._bearer.step()  # without gradients; a schedule that is ahead of its optimiser warns
        self.schedule.step()
        self.apply_rate()
        return rate

    def apply_rate(self) -> None:
        """Give the schedule's learning rate to the optimiser."""
        for group in self.inner.param_groups:
            group["lr"] = self.schedule.get_last_lr()[0]

    def tensors(self) -> Iterator[Tensor]:
        """The optimiser's state besides the model's own parameters and gradients."""
        own = {id(p) for stage in self._stages for p in stage.parameters()}
        for part in self.inner.chained_optimizers:
            if part.is_stub_optimizer:
                continue
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    if main._base is None and id(main) not in own:
                        yield main.data
                    state = part.optimizer.state.get(main, {})
                    yield from (v for v in state.values() if isinstance(v, Tensor) and v.dim())

    # ---- the state, for checkpoints

    def read_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter: `step`, and such as `exp_avg` in the parameter's shape.

        Where other ranks hold parts of it, all ranks that hold the parameter must ask for the same
        ones in one order. Empty before the first step.
        """
        part, shard, main = self._find(parameter)
        state = _kept_of(part.optimizer, main) if main is not None else {}
        if not _is_sharded(part):
            return state
        names: list[dict[str, bool]] = [{}] * dist.get_world_size(part.data_parallel_group)
        kinds = {name: value.dim() > 0 for name, value in state.items()}
        dist.all_gather_object(names, kinds, group=part.data_parallel_group)
        everything = {name: has_shape for own in names for name, has_shape in own.items()}
        found = {}
        for name, has_shape in sorted(everything.items()):
            own = state.get(name)
            if has_shape:
                found[name] = _joined(part, parameter, shard, own)
            else:  # the same on all ranks that have it
                value = torch.zeros(1, device=parameter.device) if own is None else own.view(1)
                value = value.to(parameter.device, copy=True)
                dist.all_reduce(value, op=dist.ReduceOp.MAX, group=part.data_parallel_group)
                found[name] = value[0].cpu()
        return found

    def write_state(self, parameter: nn.Parameter, values: dict[str, Tensor]) -> None:
        """Keep this rank's part of what `read_state` has told."""
        part, shard, main = self._find(parameter)
        if main is None:
            return
        state = part.optimizer.state[main]
        for name, value in values.items():
            own = value
            if value.dim() > 0:
                own = value.reshape(-1)[shard] if _is_sharded(part) else value.view_as(main)
                own = own.to(device=main.device, dtype=torch.float32)
            if name == "step" and _counts_by_group(part.optimizer):
                _group_of(part.optimizer, main)["step"] = int(own)
            else:
                state[name] = own.clone()

    def read_main(self, parameter: nn.Parameter) -> Tensor:
        """A parameter in the precision in which it is updated; to be asked for as `read_state`."""
        part, shard, main = self._find(parameter)
        if not _is_sharded(part):
            assert main is not None
            return main.detach().clone()
        return _joined(part, parameter, shard, None if main is None else main.detach())

    def write_main(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter, and what it is updated in to more digits than it has itself."""
        part, shard, main = self._find(parameter)
        parameter.detach().copy_(value)
        if main is not None:
            own = value.reshape(-1)[shard] if _is_sharded(part) else value
            main.detach().copy_(own.reshape(main.shape))

    def _find(self, parameter: nn.Parameter) -> tuple[Any, slice, Tensor | None]:
        """The optimiser that has a parameter, this rank's run of it, and what it is updated in."""
        for part in self.inner.chained_optimizers:
            if _is_sharded(part):
                if not any(parameter in buffer.param_index_map for buffer in part.buffers):
                    continue
                if parameter not in part.model_param_group_index_map:
                    return part, slice(0), None  # other ranks have all of it
                run = part._get_model_param_range_map(parameter)["param"]
                group, place = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][place]
                return part, slice(run.start, run.end), cast(Tensor, main)
            main = getattr(parameter, "main_param", parameter)
            if any(main is one for one in part.get_parameters()):
                return part, slice(None), main
        raise AssertionError("a parameter that no optimiser has")


def _kept_of(optimizer: torch.optim.Optimizer, main: Tensor) -> dict[str, Any]:
    """The state that a torch optimiser, or Megatron's replacement, keeps of a parameter."""
    kept = dict(optimizer.state.get(main, {}))
    if kept and _counts_by_group(optimizer):
        kept["step"] = torch.tensor(float(_group_of(optimizer, main)["step"]))
    return kept


def _counts_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are counted once for many parameters, as fused optimisers of others do."""
    return not type(optimizer).__module__.startswith("torch.")


def _group_of(optimizer: torch.optim.Optimizer, main: Tensor) -> dict[str, Any]:
    return next(
        group for group in optimizer.param_groups if any(main is one for one in group["params"])
    )


def _joined(part: Any, parameter: nn.Parameter, shard: slice, own: Tensor | None) -> Tensor:
    """State that several ranks have parts of, in the parameter's shape."""
    flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if own is not None:
        flat[shard] = own
    dist.all_reduce(flat, group=part.data_parallel_group)  # the runs do not overlap
    return flat.view_as(parameter)


def _is_sharded(part: Any) -> bool:
    return isinstance(part, distrib_optimizer.DistributedOptimizer)


def _megatron_config(
    config: OptimizerConfig, megatron: MegatronConfig, dtype: torch.dtype
) -> megatron_optim.OptimizerConfig:
    if config.optimizer not in KINDS:
        raise UnsupportedError(
            f"optim.optimizer={config.optimizer!r}: strategy=megatron takes {', '.join(KINDS)}"
        )
    kind = KINDS[config.optimizer]
    extra = config.override_optimizer_config or {}
    unknown = sorted(set(extra) - set(EXTRA[kind]))
    if unknown:
        raise ConfigError(
            f"optim.override_optimizer_config: with strategy=megatron, {config.optimizer} does not "
            f"take {', '.join(unknown)}; takes {', '.join(EXTRA[kind])}"
        )
    if megatron.use_distributed_optimizer and kind != "adam":
        raise ConfigError(
            f"optim.optimizer={config.optimizer!r}: megatron.use_distributed_optimizer=True takes "
            "adam; set it to False for others"
        )
    arguments: dict[str, Any] = {"sgd_momentum": 0.0}
    arguments |= {EXTRA[kind][name]: value for name, value in extra.items()}
    return megatron_optim.OptimizerConfig(
        optimizer=kind,
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        clip_grad=math.inf,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        **arguments,
    )


# ---- Tensors that wait in host memory while others need the device
#
# Megatron keeps views of views of its parameters. They all stay valid, since it is the memory
# beneath them that is given back and later taken again. It works on every device; on a CPU, which
# has one memory, it moves numbers from one place in it to another and gains nothing.


@dataclass(frozen=True)
class _Parked:
    memory: torch.UntypedStorage
    size: int
    copy: Tensor | None


class Parking:
    """Memory of tensors that is away from the device."""

    def __init__(self) -> None:
        self._parked: list[_Parked] = []

    def park(self, tensors: Iterable[Tensor], keeps: bool = True) -> None:
        """Give the memory back, until it is fetched. Its contents wait on the host, unless they are
        not to be kept: then they come back as zeros."""
        if self._parked:
            return
        seen: set[int] = set()
        for tensor in tensors:
            memory = tensor.untyped_storage()
            if memory.nbytes() and memory.data_ptr() not in seen:
                seen.add(memory.data_ptr())
                copy = _on_host(memory) if keeps else None
                self._parked.append(_Parked(memory, memory.nbytes(), copy))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies have to be complete before their source is gone
        for one in self._parked:
            one.memory.resize_(0)

    def fetch(self) -> None:
        """Bring everything back to where it was."""
        for one in self._parked:
            one.memory.resize_(one.size)
            there = _bytes(one.memory)
            if one.copy is None:
                there.zero_()
            else:
                there.copy_(one.copy, non_blocking=True)
        self._parked = []


def _bytes(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _on_host(memory: torch.UntypedStorage) -> Tensor:
    there = _bytes(memory)
    copy = torch.empty_like(there, device="cpu", pin_memory=there.is_cuda)
    return copy.copy_(there, non_blocking=True)
