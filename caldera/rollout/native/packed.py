"""The module as the sampler runs it on a CPU: its weights in the layout that oneDNN multiplies by.

PyTorch's own products of a few rows by a large matrix take up to four times as long, above all on
processors that are not Intel's.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from caldera.models.forward import decoder_layers, language_head
from caldera.rollout.native.runner import Runner
from caldera.rollout.native.trunk import plain_trunk
from caldera.rollout.native.twin import GATED, STACKS, put_joint, stackable

SMALLEST = 2**17
"""Cells of a matrix for which the call of oneDNN pays."""


def can_pack(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module that computes in this precision can be run with packed weights here."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if {parameter.dtype for parameter in module.parameters()} != {dtype}:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedWeight:
    """Multiplies by one or more matrices of the same width, laid behind each other."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self._weights = list(weights)  # (N, K) each
        self._biases = list(biases)  # (N,) each, or none
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    def pack(self) -> None:
        weights = self._weights
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole.detach(), None)
        self._bias = torch.cat(self._biases).detach() if self._biases else None

    def release(self) -> None:
        self._packed = self._bias = None

    def __call__(self, values: Tensor, then: str = "none") -> Tensor:
        """values (..., K); returns (..., N), after oneDNN's function of the name `then`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self._packed, self._bias, then, [], ""
        )
        return product

    def gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """values (..., K); the product times the gate (..., N)."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            values, gate, self._packed, self._bias, "mul"
        )
        return product


class _Gated:
    """The forward pass of a container whose values are gated by their SiLU."""

    def __init__(self, container: nn.Module, gate: PackedWeight, up: PackedWeight) -> None:
        self._container = container
        self.gate = gate
        self.up = up

    def __call__(self, values: Tensor) -> Tensor:
        gate = self.gate(values, "swish")
        out: Tensor = self._container.down_proj(self.up.gated(values, gate))  # type: ignore[operator]
        return out


class PackedTwin:
    """A copy of the module's structure that multiplies by packed copies of its large matrices.

    All other parameters are the module's own, so that only matrices are to be packed again after
    the weights have changed.
    """

    def __init__(self, module: nn.Module) -> None:
        own = [*module.parameters(), *module.buffers()]
        self._source = module
        self.module = copy.deepcopy(module, {id(each): each for each in own}).eval()
        for layer in decoder_layers(self.module):
            layer.__dict__.pop("forward", None)  # compiled for training, and the module's own
        head = PackedWeight([language_head(self.module)], [])
        self.logits: Callable[[Tensor], Tensor] = head
        self._packs = [head, *self._fuse_all(), *self._stack_all(), *self._replace_all()]
        self._known: list[tuple[int, int]] | None = None

    def _fuse_all(self) -> list[PackedWeight]:
        """Let oneDNN apply what gates the values between the products, where it knows that."""
        packs: list[PackedWeight] = []
        for container in self.module.modules():
            gate, up = stackable(container, GATED) or (None, None)
            act = type(getattr(container, "act_fn", None)).__name__
            is_known = hasattr(container, "down_proj") and act in ("SiLU", "SiLUActivation")
            if gate is None or up is None or gate.bias is not None or not is_known:
                continue
            if gate.weight.numel() >= SMALLEST:
                gated = _Gated(container, *(PackedWeight([each.weight], []) for each in (gate, up)))
                container.forward = gated
                packs += [gated.gate, gated.up]
        return packs

    def _stack_all(self) -> list[PackedWeight]:
        packs = []
        for container in list(self.module.modules()):
            for names in STACKS:
                linears = stackable(container, names)
                if sum(linear.weight.numel() for linear in linears) < SMALLEST:
                    continue
                biases = [linear.bias for linear in linears if linear.bias is not None]
                pack = PackedWeight([linear.weight for linear in linears], biases)
                put_joint(container, names, pack, [linear.out_features for linear in linears])
                packs.append(pack)
        return packs

    def _replace_all(self) -> list[PackedWeight]:
        packs = []
        for part in self.module.modules():
            if type(part) is nn.Linear and part.weight.numel() >= SMALLEST:
                pack = PackedWeight([part.weight], [] if part.bias is None else [part.bias])
                part.forward = pack  # type: ignore[method-assign,assignment]
                packs.append(pack)
        return packs

    def refresh(self, weights_changed: bool) -> None:
        """Pack the weights, unless that was done since they changed."""
        known = [(each._version, each.data_ptr()) for each in self._source.parameters()]
        if weights_changed or known != self._known:
            with torch.no_grad():
                for pack in self._packs:
                    pack.pack()
        self._known = known

    def release(self) -> None:
        self._known = None
        for pack in self._packs:
            pack.release()


class PackedRunner(Runner):
    """Steps on a CPU, with packed weights."""

    def __init__(self, module: nn.Module, device: torch.device, rows: int) -> None:
        super().__init__(module, device, rows)
        self._twin = PackedTwin(module)
        self._module = self._twin.module
        self._trunk = plain_trunk(self._module)

    def prepare(self, weights_changed: bool) -> None:
        self._twin.refresh(weights_changed)

    def rest(self) -> None:
        self._twin.release()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._twin.logits(hidden).float()
