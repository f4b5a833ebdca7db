"""Weights in and out: one Hugging Face tensor at a time in, buckets of them out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.stage import Stage
from caldera.errors import UnsupportedError
from caldera.models.pretrained import VALUE_HEAD, WeightSource

# ---- Which part of which Megatron parameter is which Hugging Face tensor
#
# A rank's query, key and value matrices lie in one parameter, those of each group of heads
# together. Gate and up matrices lie in one as well, one after the other. What tensor parallelism
# cuts is cut so that a rank has a run of the Hugging Face tensor's rows or columns, as
# `torch.chunk` would cut it.

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
    backbone = f"{model.base_model_prefix}."
    found = [
        piece
        for stage in stages
        for name, parameter in stage.named_parameters()
        for piece in _pieces(name, parameter, stage, model, places, backbone)
    ]
    for piece in found:
        # Megatron marks parameters when it initialises them, which it does not do here. Those of
        # which tensor-parallel ranks have the same count once in the gradient's norm.
        is_own = piece.dimension is not None or piece.expert is not None
        piece.parameter.tensor_model_parallel = is_own  # type: ignore[attr-defined]
        piece.parameter.partition_dim = piece.dimension or 0  # type: ignore[attr-defined]
    return found


def _pieces(
    name: str,
    parameter: nn.Parameter,
    stage: Stage,
    model: PreTrainedModel,
    places: Places,
    backbone: str,
) -> list[Piece]:
    if name == "embedding.word_embeddings.weight":
        return [_vocabulary(f"{backbone}embed_tokens.weight", parameter, model, places)]
    if name == "output_layer.weight" and stage.has_language_head:
        return [_vocabulary("lm_head.weight", parameter, model, places)]
    if name.startswith("output_layer."):
        return [_whole(name.replace("output_layer", VALUE_HEAD), parameter)]
    if name == "decoder.final_layernorm.weight":
        return [_whole(f"{backbone}norm.weight", parameter)]
    found = LAYER.fullmatch(name)
    assert found is not None, name
    number = stage.decoder.layers[int(found[1])].layer_number - 1
    return _layer_pieces(f"{backbone}layers.{number}.", found[2], parameter, stage, places)


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


BUCKET_BYTES = 256 * 2**20
"""Whole tensors that exist at the same time; a larger one is alone."""


class Weights:
    """This rank's pieces by the names of their Hugging Face tensors, and who has the others."""

    def __init__(self, pieces: list[Piece], model: PreTrainedModel, places: Places) -> None:
        self._places = places
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.name].append(piece)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._tied = dict(model.all_tied_weights_keys)
        own = {name: held[0].parameter.dtype for name, held in self._pieces.items()}
        all_own: list[dict[str, torch.dtype]] = [{} for _ in range(places.pp_size)]
        dist.all_gather_object(all_own, own, group=places.pp_group)
        self._stages: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for name in self._shapes:
            stored = name if any(name in held for held in all_own) else self._tied.get(name, name)
            stages = tuple(rank for rank, held in enumerate(all_own) if stored in held)
            if not stages:
                raise UnsupportedError(
                    f"strategy=megatron: {type(model).__name__} has the parameter {name}, which is "
                    "not known"
                )
            self._stages[name], self._dtypes[name] = stages, all_own[stages[0]][stored]

    def pieces(self) -> dict[str, list[Piece]]:
        """This rank's, by Hugging Face name; one, or one for each expert that is here."""
        return dict(self._pieces)

    def fill(self, source: WeightSource) -> None:
        """Give the parameters their values; each rank reads every tensor of which it has a part."""
        for name, held in self._pieces.items():
            whole = source.tensor(name)
            for piece in held:
                piece.write(self.part(piece, whole))

    def part(self, piece: Piece, whole: Tensor) -> Tensor:
        """Of a whole Hugging Face tensor, what the piece is."""
        if piece.expert is not None:
            return whole[piece.expert]
        if piece.dimension is None or self._places.tp_size == 1:
            return whole
        parts = whole.chunk(self._places.tp_size, piece.dimension)
        rank = self._places.tp_rank
        return parts[rank] if rank < len(parts) else whole.narrow(piece.dimension, 0, 0)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of all, on every rank, which all have to go through them."""
        for stage, names in groupby(self._shapes, lambda name: self._stages[name][0]):
            for bucket in self._buckets(names):
                yield from self._spread(stage, bucket)

    def _buckets(self, names: Iterator[str]) -> Iterator[list[str]]:
        bucket: list[str] = []
        filled = 0
        for name in names:
            size = self._shapes[name].numel() * self._dtypes[name].itemsize
            changes = bucket and self._dtypes[name] != self._dtypes[bucket[0]]
            if bucket and (changes or filled + size > BUCKET_BYTES):
                yield bucket
                bucket, filled = [], 0
            bucket.append(name)
            filled += size
        if bucket:
            yield bucket

    def _spread(self, stage: int, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one pipeline stage, given to all others in one message."""
        places = self._places
        if places.pp_size == 1:
            yield from ((name, self._gather(name)) for name in names)
            return
        device = next(iter(self._pieces.values()))[0].parameter.device
        sizes = [self._shapes[name].numel() for name in names]
        if places.pp_rank == stage:
            flat = torch.cat([self._gather(name).flatten() for name in names])
        else:
            flat = torch.empty(sum(sizes), dtype=self._dtypes[names[0]], device=device)
        dist.broadcast(flat, group=places.pp_group, group_src=stage)
        for name, part in zip(names, flat.split(sizes), strict=True):
            yield name, part.view(self._shapes[name])

    def _gather(self, name: str) -> Tensor:
        """The whole tensor from the ranks of this stage."""
        held = self._pieces[name if name in self._pieces else self._tied[name]]
        first, places = held[0], self._places
        if first.expert is not None:
            local = torch.stack([piece.read() for piece in held])
            return local if places.ep_size == 1 else _joined(local, 0, places.ep_group)
        local = first.read()
        if first.dimension is None or places.tp_size == 1:
            return local
        whole = self._shapes[name][first.dimension]
        missing = -(-whole // places.tp_size) - local.shape[first.dimension]
        if missing:
            before = [0, 0] * (local.dim() - 1 - first.dimension)
            local = F.pad(local, [*before, 0, missing])
        joined = _joined(local, first.dimension, places.tp_group)
        return joined.narrow(first.dimension, 0, whole)


def _joined(local: Tensor, dimension: int, group: dist.ProcessGroup) -> Tensor:
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dimension)
