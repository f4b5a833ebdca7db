"""One module that goes from packed tokens to what is wanted of them, trunk and head alike.

Engines that shard a model gather its weights when a module's forward begins and drop them when it
ends. So whatever uses a weight must happen in the forward of the module that is sharded: this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from caldera.engine.base import FrozenStates, OutputName
from caldera.engine.packing import PackedRows
from caldera.errors import UnsupportedError
from caldera.models.exact import exactness, is_exact
from caldera.models.forward import (
    hidden_states,
    language_head,
    value_scores,
)
from caldera.models.head import full_kl, head_outputs
from caldera.models.support import refuse_longer, refuse_other_models

PREFIX = "inner."
"""What the names of parameters begin with here, and nowhere else."""


class PackedModel(nn.Module):
    """`inner` is the Hugging Face model, or the peft wrapper around it."""

    def __init__(
        self, inner: nn.Module, autocast: torch.dtype | None = None, offloads: bool = False
    ) -> None:
        """`autocast`: compute in another precision than that of the parameters. `offloads`: keep
        what the backward pass needs in host memory meanwhile."""
        super().__init__()
        refuse_other_models(inner)
        self.inner = inner
        self._longest = 0  # of the sequences that were checked
        self._autocast = autocast
        self._offloads = offloads

    def forward(
        self, packed: PackedRows, names: Sequence[OutputName], temperature: float = 1.0,
        reference: FrozenStates | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """What is named, of each of the n places, (n,). `full_kl` is that from the reference.

        Without names: the hidden states (n, H) there and the language head (V, H).
        """
        with exactness(self._is_exact()):
            return self._forward(packed, names, temperature, reference)

    def _is_exact(self) -> bool:
        exact = is_exact(self.inner)
        if exact and self._autocast is not None:
            raise UnsupportedError(
                "actor_rollout_ref.rollout.native.exact=True: fsdp_config.dtype and "
                "fsdp_config.model_dtype must be the same"
            )
        return exact

    def _forward(
        self, packed: PackedRows, names: Sequence[OutputName], temperature: float,
        reference: FrozenStates | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        with self._kept_activations():
            hidden = self._hidden(packed)  # (n, H)
        if not names:
            return self._frozen(hidden)
        if names[0] in ("values", "scores"):
            return {names[0]: self._values(hidden)}
        head = language_head(self.inner)
        told = head_outputs(hidden, head, packed.labels, temperature, names)
        found: dict[str, Tensor] = {str(name): value for name, value in told.items()}
        if reference is not None:
            found["full_kl"] = full_kl(hidden, head, *reference, temperature)
        return found

    def _frozen(self, hidden: Tensor) -> dict[str, Tensor]:
        head = language_head(self.inner).detach().to(hidden.dtype)
        return {"hidden": hidden, "head": head.clone()}  # a sharded one is dropped after this

    def _values(self, hidden: Tensor) -> Tensor:
        """In the precision of the head's parameters, whatever the rest computes in: rounded to
        bfloat16, the scores of two answers would often be the same."""
        # FSDP would warn of the view of a (n, 1) tensor.
        return value_scores(self.inner, hidden).clone()

    def _hidden(self, packed: PackedRows) -> Tensor:
        """Hidden states (n, H) of the tokens at which something is computed."""
        if packed.longest > self._longest:
            refuse_longer(self.inner, packed.longest, "the longest sequence")
            self._longest = packed.longest
        with self._precision(packed.input_ids.device):
            hidden = hidden_states(
                self.inner, packed.input_ids, packed.position_ids, packed.context
            )  # (t, H)
        hidden = hidden.index_select(0, packed.predictors)
        # Under autocast, the last norm has promoted its output.
        return hidden if self._autocast is None else hidden.to(self._autocast)

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self._autocast)

    def _kept_activations(self) -> AbstractContextManager[object]:
        if not (self._offloads and torch.is_grad_enabled()):
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
