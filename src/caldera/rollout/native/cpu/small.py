"""Layers whose matrices are so small that calls cost more than their work: one call a layer."""

from __future__ import annotations

from torch import Tensor

from caldera.rollout.native.cpu.attention import CompiledAttention
from caldera.rollout.native.cpu.kernels import TILE, Matrices
from caldera.rollout.native.cpu.weights import SMALLEST_PACKED, HeldWeight
from caldera.rollout.native.layers import LayerParts


class TiledWeight(HeldWeight):
    """For the kernels: (N, K) as (N / TILE, K, TILE)."""

    def _laid_out(self, whole: Tensor) -> Tensor:
        return whole.view(-1, TILE, whole.shape[1]).transpose(1, 2).contiguous()

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Of the matrix, and of the bias if there is one."""
        assert self._packed is not None, "it is packed before it is used"
        return self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()


class SmallLayer:
    """The forward pass of a decoder layer."""

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        first, second = parts.scales
        self._inward = TiledWeight.of(*parts.inward, scale=first)
        self._others = [
            TiledWeight.of(parts.outward), TiledWeight.of(parts.gate, scale=second),
            TiledWeight.of(parts.up, scale=second), TiledWeight.of(parts.down),
        ]  # fmt: skip
        self._width = sum(linear.out_features for linear in parts.inward)
        self._sizes = parts.down.out_features, parts.down.in_features
        self.packs = [self._inward, *self._others]

    @staticmethod
    def fits(parts: LayerParts) -> bool:
        others = (parts.outward, parts.gate, parts.up, parts.down)
        joint = sum(linear.out_features for linear in parts.inward)
        widths = [joint, *(linear.out_features for linear in others)]
        return (
            all(width % TILE == 0 for width in widths)
            and all(linear.bias is None for linear in others)
            and max(joint, parts.gate.out_features) * parts.gate.in_features < SMALLEST_PACKED
        )

    def __call__(
        self, values: Tensor, turn: tuple[Tensor, Tensor], attention: CompiledAttention
    ) -> Tensor:
        """values (T, H), which are changed."""
        parts = self._parts
        matrices = Matrices(
            *self._inward.addresses, *(weight.addresses[0] for weight in self._others),
            *self._sizes, *parts.epsilons, values.data_ptr(),
        )  # fmt: skip
        heads = parts.heads(values.new_empty(len(values), self._width))
        attention.run_layer(parts.attention, heads, turn, matrices)
        return values
