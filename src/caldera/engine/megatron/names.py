"""Which part of which Megatron parameter is which Hugging Face tensor.

A rank's query, key and value matrices lie in one parameter, those of each group of heads together.
Gate and up matrices lie in one as well, one after the other. What tensor parallelism cuts is cut so
that a rank has a run of the Hugging Face tensor's rows or columns, as `torch.chunk` would cut it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.stage import Stage
from caldera.models.adapters import VALUE_HEAD

View = Callable[[Tensor], Tensor]
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
CUT: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
"""Parameters of a layer that are one tensor, with the dimension that is cut."""


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of one Hugging Face tensor, or of one expert in it, in a parameter."""

    name: str
    """Of the Hugging Face tensor."""
    parameter: nn.Parameter
    dimension: int | None
    """Of the Hugging Face tensor, that tensor-parallel ranks cut as `torch.chunk` does; None: each
    has all of it."""
    shape: torch.Size
    """Of this rank's part."""
    view: View
    """Where the part lies in a tensor of the parameter's shape; the same numbers in order."""
    expert: int | None = None
    """The place in the Hugging Face tensor's first dimension where it holds all experts; the shape
    is then one expert's."""

    def read(self, tensor: Tensor | None = None) -> Tensor:
        """The part, from the parameter or from a tensor of its shape, such as Adam's averages."""
        source = self.parameter.detach() if tensor is None else tensor
        return self.view(source).reshape(self.shape)

    def write(self, part: Tensor, tensor: Tensor | None = None) -> None:
        """Put the part into the parameter, or into a tensor of its shape."""
        there = self.view(self.parameter.detach() if tensor is None else tensor)
        there.copy_(part.reshape(there.shape))


def find_pieces(stages: Iterable[Stage], model: PreTrainedModel, places: Places) -> list[Piece]:
    """All that this rank's stages hold."""
    trunk = f"{model.base_model_prefix}."
    found = [
        piece
        for stage in stages
        for name, parameter in stage.named_parameters()
        for piece in _pieces(name, parameter, stage, model, places, trunk)
    ]
    for piece in found:
        # Megatron marks parameters when it initialises them, which it does not do here. Those of
        # which tensor-parallel ranks have the same count once in the gradient's norm.
        is_own = piece.dimension is not None or piece.expert is not None
        piece.parameter.tensor_model_parallel = is_own  # type: ignore[attr-defined]
        piece.parameter.partition_dim = piece.dimension or 0  # type: ignore[attr-defined]
    return found


def _pieces(
    name: str, parameter: nn.Parameter, stage: Stage, model: PreTrainedModel, places: Places,
    trunk: str,
) -> list[Piece]:  # fmt: skip
    if name == "embedding.word_embeddings.weight":
        return [_vocabulary(f"{trunk}embed_tokens.weight", parameter, model, places)]
    if name == "output_layer.weight" and stage.has_language_head:
        return [_vocabulary("lm_head.weight", parameter, model, places)]
    if name.startswith("output_layer."):
        return [_whole(name.replace("output_layer", VALUE_HEAD), parameter)]
    if name == "decoder.final_layernorm.weight":
        return [_whole(f"{trunk}norm.weight", parameter)]
    found = LAYER.fullmatch(name)
    assert found is not None, name
    number = stage.decoder.layers[int(found[1])].layer_number - 1
    return _layer_pieces(f"{trunk}layers.{number}.", found[2], parameter, stage, places)


def _layer_pieces(
    prefix: str, name: str, parameter: nn.Parameter, stage: Stage, places: Places
) -> list[Piece]:
    if name in CUT:
        own, dimension = CUT[name]
        return [_whole(prefix + own, parameter, dimension)]
    if name.startswith("self_attention.linear_qkv."):
        return _heads(f"{prefix}self_attn.", name.rpartition(".")[2], parameter, stage)
    if name == "mlp.linear_fc1.weight":
        half = len(parameter) // 2
        shape = torch.Size((half, *parameter.shape[1:]))
        return [
            Piece(f"{prefix}mlp.{which}_proj.weight", parameter, 0, shape, partial(_rows, rows))
            for which, rows in (("gate", slice(half)), ("up", slice(half, None)))
        ]
    expert = EXPERT.fullmatch(name)
    assert expert is not None, name
    local = stage.config.num_moe_experts // places.ep_size
    which = "gate_up_proj" if expert[2] == "1" else "down_proj"
    number = places.ep_rank * local + int(expert[1])
    return [
        Piece(
            f"{prefix}mlp.experts.{which}", parameter, None, parameter.shape, _same, expert=number
        )
    ]


def _whole(name: str, parameter: nn.Parameter, dimension: int | None = None) -> Piece:
    return Piece(name, parameter, dimension, parameter.shape, _same)


def _vocabulary(
    name: str, parameter: nn.Parameter, model: PreTrainedModel, places: Places
) -> Piece:
    """Without the rows that were added."""
    start = places.tp_rank * len(parameter)
    rows = min(max(int(model.config.vocab_size) - start, 0), len(parameter))
    shape = torch.Size((rows, *parameter.shape[1:]))
    return Piece(name, parameter, 0, shape, partial(_rows, slice(rows)))


def _heads(prefix: str, kind: str, parameter: nn.Parameter, stage: Stage) -> list[Piece]:
    width = stage.config.kv_channels
    queries = stage.config.num_attention_heads // stage.config.num_query_groups
    groups = len(parameter) // (width * (queries + 2))
    rest = parameter.shape[1:]
    pieces = []
    for which, heads in (
        ("q", slice(queries)),
        ("k", slice(queries, queries + 1)),
        ("v", slice(queries + 1, None)),
    ):
        count = groups * (queries if which == "q" else 1)
        view = partial(_of_groups, (groups, queries + 2, width), heads)
        shape = torch.Size((count * width, *rest))
        pieces.append(Piece(f"{prefix}{which}_proj.{kind}", parameter, 0, shape, view))
    return pieces


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _rows(rows: slice, tensor: Tensor) -> Tensor:
    return tensor[rows]


def _of_groups(sizes: tuple[int, int, int], heads: slice, tensor: Tensor) -> Tensor:
    return tensor.view(*sizes, *tensor.shape[1:])[:, heads]
