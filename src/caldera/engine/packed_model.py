"""One module that goes from packed tokens to what is wanted of them, backbone and head alike.

Engines that shard a model gather its weights when a module's forward begins and drop them when it
ends. So whatever uses a weight must happen in the forward of the module that is sharded: this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from caldera.engine.base import FrozenStates, OutputName
from caldera.errors import UnsupportedError
from caldera.models.attention import AttentionContext, PackedSequences
from caldera.models.exact import exactness, is_exact
from caldera.models.forward import (
    hidden_states,
    language_head,
    send,
    value_scores,
)
from caldera.models.head import full_kl, head_outputs
from caldera.models.support import refuse_longer, refuse_other_models
from caldera.models.ulysses import ALONE, SequenceGroup, SharedSequences, join_tokens
from caldera.protocol import DataProto, tensors_of

# ---- From padded rows to packed tokens, and back: padding exists on neither side of the model


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, and at which of them something is computed.

    `pack_rows`: for each of the N response tokens that the loss can see (response_mask 1), at the
    token before it. `pack_ends`: at the last token of each of the N rows that have a response.
    Where a group of ranks shares the tokens, each has t of the T tokens and n of the N places.
    """

    input_ids: Tensor  # (1, t)
    position_ids: Tensor  # (1, t)
    context: AttentionContext
    predictors: Tensor  # (n,) indices, among the t tokens, of those at which it is computed
    labels: Tensor  # (n,) the response tokens
    cells: Tensor  # (N,) their places in the flattened (B, R) matrix
    shape: tuple[int, int]  # (B, R)
    counts: list[int]
    """n of each rank of the group."""
    longest: int
    """Tokens of the longest row."""
    sequence: SequenceGroup = ALONE

    def unpack(self, values: Tensor) -> Tensor:
        """(n,) values to a (B, R) matrix, the same on all ranks of the group; else 0."""
        rows, width = self.shape
        flat = torch.zeros(rows * width, dtype=values.dtype, device=values.device)
        joined = join_tokens(values, self.counts, self.sequence)  # (N,)
        return flat.index_copy(0, self.cells, joined).view(rows, width)


def pack_rows(
    rows: DataProto, device: torch.device, sequence: SequenceGroup = ALONE, multiple: int = 1
) -> PackedRows:
    """Drop the padding of left-padded prompts and right-padded responses. Each rank of a group gets
    a `multiple` of tokens."""
    tensors = tensors_of(rows)
    response_mask = tensors["response_mask"].bool()  # (B, R)
    seen = response_mask & tensors["attention_mask"][:, -response_mask.shape[1] :].bool()
    return _pack(rows, seen, -1, device, sequence, multiple)


def pack_ends(
    rows: DataProto, device: torch.device, sequence: SequenceGroup = ALONE, multiple: int = 1
) -> PackedRows:
    """The same, to be read at each row's last token; a row without response is not read."""
    tensors = tensors_of(rows)
    width = tensors["responses"].shape[1]
    attended = tensors["attention_mask"][:, -width:].bool()  # (B, R)
    last = attended.sum(1, keepdim=True) - 1  # (B, 1)
    chosen = torch.arange(width, device=last.device) == last
    return _pack(rows, chosen, 0, device, sequence, multiple)


def _pack(
    rows: DataProto,
    chosen: Tensor,
    offset: int,
    device: torch.device,
    sequence: SequenceGroup,
    multiple: int,
) -> PackedRows:
    """To be read at the `chosen` response tokens (B, R), or `offset` tokens from there."""
    tensors = tensors_of(rows)
    attention = tensors["attention_mask"].bool()  # (B, P + R)
    width = chosen.shape[1]
    packed_index = attention.flatten().cumsum(0).view_as(attention) - 1  # (B, P + R)
    input_ids = tensors["input_ids"][attention]  # (T,)
    lengths: list[int] = attention.sum(1).tolist()
    if missing := -len(input_ids) % (multiple * sequence.size):  # a sequence nobody looks at
        input_ids = torch.cat([input_ids, input_ids.new_zeros(missing)])
        lengths = [*lengths, missing]
    whole = PackedSequences(lengths, device)
    predictors = packed_index[:, -width:][chosen] + offset  # (N,) ascending
    labels = tensors["input_ids"][:, -width:][chosen]
    share = len(input_ids) // sequence.size
    bounds = torch.searchsorted(predictors, torch.arange(sequence.size + 1) * share).tolist()
    own, mine = sequence.own(len(input_ids)), slice(*bounds[sequence.rank : sequence.rank + 2])
    return PackedRows(
        input_ids=send(input_ids[own][None], device),
        position_ids=whole.position_ids[:, own],
        context=whole if sequence.size == 1 else SharedSequences(whole, sequence),
        predictors=send(predictors[mine] - own.start, device),
        labels=send(labels[mine], device),
        cells=send(chosen.flatten().nonzero().flatten(), device),
        shape=(len(rows), width),
        counts=[bounds[r + 1] - bounds[r] for r in range(sequence.size)],
        longest=whole.max_length,
        sequence=sequence,
    )


PREFIX = "inner."
"""The prefix of parameter names in this class; names in files have none."""


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
        self,
        packed: PackedRows,
        names: Sequence[OutputName],
        temperature: float = 1.0,
        reference: FrozenStates | None = None,
    ) -> dict[str, Tensor]:
        """The named outputs of each of the n places, (n,). `full_kl` is that from the reference.

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
        self,
        packed: PackedRows,
        names: Sequence[OutputName],
        temperature: float,
        reference: FrozenStates | None,
    ) -> dict[str, Tensor]:
        with self._kept_activations():
            hidden = self._hidden(packed)  # (n, H)
        if names and names[0] in ("values", "scores"):
            # In the precision of the head's parameters, whatever the rest computes in: rounded to
            # bfloat16, the scores of two responses would often be the same. FSDP would warn of the
            # view of a (n, 1) tensor.
            return {names[0]: value_scores(self.inner, hidden).clone()}
        head = language_head(self.inner)
        if not names:  # a sharded head is dropped after this
            return {"hidden": hidden, "head": head.detach().to(hidden.dtype).clone()}
        told = head_outputs(hidden, head, packed.labels, temperature, names)
        found: dict[str, Tensor] = {str(name): value for name, value in told.items()}
        if reference is not None:
            found["full_kl"] = full_kl(hidden, head, *reference, temperature)
        return found

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
