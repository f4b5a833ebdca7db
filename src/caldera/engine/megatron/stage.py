"""One stage of a model in Megatron's layers, and the head over a vocabulary that ranks share."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from caldera.engine.base import ForwardPlan, Outputs
from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.shape import has_experts
from caldera.engine.packed_model import PackedRows
from caldera.models.attention import AttentionContext
from caldera.models.head import HeadGradients, HeadOutput, chunk_rows, head_outputs, row_operations
from caldera.models.pretrained import VALUE_HEAD

NOWHERE = -1e30
"""The logit of a word that does not exist, and stands for the labels of other ranks. It is finite:
zero times infinity is no number."""


@dataclass(frozen=True)
class VocabularyPart:
    """The run of the vocabulary that this rank has."""

    start: int
    size: int
    """Words; rows of the weight beyond these are padding."""
    group: dist.ProcessGroup


def cut_head_outputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    names: Collection[str],
    part: VocabularyPart,
) -> dict[HeadOutput, Tensor]:
    """`head_outputs` where each rank has some rows of the weight; the same on all ranks.

    hidden (N, H) is the same on all ranks. Each gets the gradient that comes from its own rows, so
    that these have to be added up.
    """
    log_probs, entropy, squares = _CutHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, part, "entropy" in names, "sum_pi_squared" in names
    )
    found: dict[HeadOutput, Tensor] = {
        "log_probs": log_probs,
        "entropy": entropy,
        "sum_pi_squared": squares,
    }
    return {name: value for name, value in found.items() if name in names}


class _CutHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        part: VocabularyPart,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        own = labels - part.start  # (N,)
        is_own = (own >= 0) & (own < part.size)
        own = torch.where(is_own, own, part.size)  # the word that does not exist
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        found = hidden.new_zeros(4, hidden.shape[0], dtype=dtype)
        log_probs, normaliser, entropy, squares = found
        write, _ = row_operations(hidden)
        for rows, logits in _logits_by_chunk(hidden, weight, part.size):
            write(
                logits,
                own[rows],
                temperature,
                log_probs[rows],
                normaliser[rows],
                entropy[rows] if with_entropy else None,
                squares[rows] if with_squares else None,
            )
        # The label's logit after temperature, 0 where another rank has it.
        found[0] = torch.where(is_own, log_probs + normaliser, 0.0)
        label, whole, entropy, squares = _of_all_ranks(found, part.group)
        ctx.save_for_backward(hidden, weight, own, whole, entropy if with_entropy else None)
        ctx.temperature, ctx.size = temperature, part.size
        if with_squares:
            ctx.mark_non_differentiable(squares)
        return label - whole, entropy if with_entropy else None, squares if with_squares else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, own, normaliser, entropy = ctx.saved_tensors
        grad_log_probs, grad_entropy = (g if g is None else g.contiguous() for g in grads[:2])
        assert grad_log_probs is not None, "autograd fills in zeros"
        gradients = HeadGradients(ctx.needs_input_grad[:2], hidden, weight[: ctx.size])
        _, slope = row_operations(hidden)
        for rows, logits in _logits_by_chunk(hidden, weight, ctx.size):
            of_logits = slope(
                logits,
                own[rows],
                ctx.temperature,
                normaliser[rows],
                None if entropy is None else entropy[rows],
                grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
            )
            gradients.add(rows, of_logits[:, : ctx.size])
        of_weight = gradients.of_weight
        if of_weight is not None and len(of_weight) < len(weight):
            of_weight = torch.cat([of_weight, of_weight.new_zeros(weight[ctx.size :].shape)])
        return gradients.of_hidden, of_weight, None, None, None, None, None


def _logits_by_chunk(hidden: Tensor, weight: Tensor, words: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits (n, words + 1), of which the last is nowhere; in the same memory."""
    count = hidden.shape[0]
    size = chunk_rows(hidden, words + 1, hidden.element_size())
    width = -(-(words + 1) // 16) * 16  # rows begin where kernels read them fast
    buffer = hidden.new_empty(min(count, size), width)[:, : words + 1]
    transposed = weight[:words].to(hidden.dtype).t()
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        logits = buffer[: rows.stop - start]
        torch.mm(hidden[rows], transposed, out=logits[:, :words])
        logits[:, words] = NOWHERE
        yield rows, logits


def _of_all_ranks(found: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Label logits, normalisers, entropies and sums of squares (4, N) of each rank's vocabulary, to
    those of the whole."""
    parts = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, found, group=group)
    label, normaliser, entropy, squares = torch.stack(parts, 1)  # each (ranks, N)
    whole = torch.logsumexp(normaliser, 0)
    share = torch.exp(normaliser - whole)  # of each rank's vocabulary in all probability
    # A rank's entropy is its normaliser less its mean logit.
    mean_logit = (share * (normaliser - entropy)).sum(0)
    return label.sum(0), whole, whole - mean_logit, (share.square() * squares).sum(0)


# ---- From the last stage's hidden states to what a plan asks for


def find_outputs(
    stage: Stage, hidden: Tensor, packed: PackedRows, plan: ForwardPlan, places: Places, words: int
) -> Outputs:
    """Each (B, R), on all ranks that have the last stage of these rows. `words`: the vocabulary."""
    is_cut = stage.has_language_head and places.tp_size > 1
    chosen = _at_places(hidden, packed, stage.config.sequence_parallel, is_cut)  # (n, H)
    weight = stage.head_weight
    if not stage.has_language_head:
        bias = cast(Tensor | None, stage.output_layer.bias)
        values = F.linear(chosen.to(weight.dtype), weight, bias).squeeze(-1)
        precise = values.to(torch.promote_types(values.dtype, torch.float32))
        return {plan.outputs[0]: packed.unpack(precise)}
    if is_cut:
        start = places.tp_rank * len(weight)
        size = min(max(words - start, 0), len(weight))
        part = VocabularyPart(start, size, places.tp_group)
        found = cut_head_outputs(
            chosen, weight, packed.labels, plan.temperature, plan.outputs, part
        )
    else:
        found = head_outputs(chosen, weight, packed.labels, plan.temperature, plan.outputs)
    return {name: packed.unpack(value) for name, value in found.items()}


def _at_places(hidden: Tensor, packed: PackedRows, is_shared: bool, is_cut: bool) -> Tensor:
    """Hidden states (n, H) of the tokens at which something is computed.

    `is_shared`: tensor-parallel ranks have parts of the tokens. `is_cut`: each of them goes on to
    compute another part of the outcome, so that their gradients are added up.
    """
    if is_shared:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=is_cut
        )
    elif is_cut:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0].index_select(0, packed.predictors)


@dataclass(frozen=True)
class Packed:
    """The packed tokens' layout for attention; Megatron hands it through its layers."""

    context: AttentionContext
    cosine: Tensor  # (t, 1, D)
    sine: Tensor
    qkv_format: str = "thd"
    """Megatron's word for tokens end to end."""


class Norm(nn.Module):
    """Root mean square norm. Each rank of a sequence-parallel group sees some of the tokens."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # Megatron adds the ranks' gradients up where it finds this.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        precise = hidden.float()
        precise = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * precise.to(hidden.dtype)


class PackedAttention(nn.Module):
    """Causal attention of each packed sequence to itself; also turns queries and keys."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_idx = layer_number - 1
        self._scale = config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _: None,
        *,
        packed_seq_params: Packed,
        **__: Any,
    ) -> Tensor:
        """query (t, heads, D); key and value (t, groups, D); returns (t, heads * D)."""
        query, key = (_turn(x, packed_seq_params) for x in (query, key))
        context = packed_seq_params.context
        attended = context.attend(self, query, key, value.contiguous(), self._scale, None)
        return attended.flatten(1)


def _turn(heads: Tensor, packed: Packed) -> Tensor:
    """Rotary position embedding of (t, heads, D)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * packed.cosine + torch.cat([-second, first], dim=-1) * packed.sine


class Router(TopKRouter):  # type: ignore[misc]
    """Chooses experts. Megatron's own product of matrices needs Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:  # its name is Megatron's
        """Logits (t, 1, experts) of hidden states (t, 1, H)."""
        return F.linear(input, self.weight)


class Stage(LanguageModule):  # type: ignore[misc]
    """Some layers of the model; the first stage embeds tokens, the last one holds the head."""

    def __init__(
        self,
        config: TransformerConfig,
        model: PreTrainedModel,
        places: Places,
        number: int,
    ) -> None:
        """`number` counts this rank's virtual stages from 0."""
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = number if places.virtual_stages > 1 else None
        self.pre_process = places.pp_rank == 0 and number == 0
        is_last = number == places.virtual_stages - 1
        self.post_process = places.pp_rank == places.pp_size - 1 and is_last
        self.has_language_head = model.get_output_embeddings() is not None
        tied = bool(model.config.tie_word_embeddings)
        self.share_embeddings_and_output_weights = self.has_language_head and tied
        self._padding = cast(nn.Embedding, model.get_input_embeddings()).padding_idx
        self._tp_rank = places.tp_rank
        self.rotary = copy.deepcopy(cast(nn.Module, model.base_model.rotary_emb))
        vocabulary = padded_vocabulary(model, places)
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config, vocabulary, 0, position_embedding_type="rope"
            )
        self.decoder = TransformerBlock(
            config,
            _layers(config, model, self.vp_stage, places.pp_rank),
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=self.vp_stage,
        )
        if self.post_process:
            self.output_layer = self._head(model, vocabulary)
        self.setup_embeddings_and_output_layer()

    def _head(self, model: PreTrainedModel, vocabulary: int) -> nn.Module:
        """Its weight is what counts: the engine computes with it."""
        config = self.config
        if self.has_language_head:
            return cast(
                nn.Module,
                tensor_parallel.ColumnParallelLinear(
                    config.hidden_size,
                    vocabulary,
                    config=config,
                    init_method=nn.init.zeros_,
                    bias=False,
                    skip_weight_param_allocation=(
                        self.pre_process and self.share_embeddings_and_output_weights
                    ),
                ),
            )
        found = cast(nn.Linear, getattr(model, VALUE_HEAD))
        dtype = config.params_dtype
        if found.weight.dtype != model.base_model.dtype:
            dtype = found.weight.dtype  # one that is more precise than the backbone stays so
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        return nn.Linear(
            config.hidden_size, 1, bias=found.bias is not None, dtype=dtype, device=device
        )

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the language head, or the value head's only one."""
        if self.share_embeddings_and_output_weights:
            return cast(Tensor, self.shared_embedding_or_output_weight())
        return cast(Tensor, self.output_layer.weight)

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """(t, 1, H), or this rank's part of t. Padding, wherever it is met, gets no gradient."""
        embedded = cast(Tensor, self.embedding(input_ids, position_ids))
        if self._padding is None:
            return embedded
        is_padding = (input_ids == self._padding).t()[..., None]  # (t, 1, 1)
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self.config.tensor_model_parallel_size)[self._tp_rank]
        return torch.where(is_padding, embedded.detach(), embedded)

    def set_input_tensor(self, received: list[Tensor] | Tensor) -> None:
        """The input from the stage before; Megatron's schedules call this."""
        self.decoder.set_input_tensor(received[0] if isinstance(received, list) else received)

    def forward(self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """input_ids and position_ids (1, t); hidden states (t, 1, H), or this rank's part of t."""
        hidden = self._embedded(input_ids, position_ids) if self.pre_process else None
        like = torch.empty(0, dtype=self.config.params_dtype, device=input_ids.device)
        cosine, sine = self.rotary(like, position_ids)  # (1, t, D)
        packed = Packed(context, cosine.transpose(0, 1), sine.transpose(0, 1))
        return cast(Tensor, self.decoder(hidden, None, packed_seq_params=packed))


def padded_vocabulary(model: PreTrainedModel, places: Places) -> int:
    """Rows of the embedding, padded so that every rank has equally many."""
    rows = -(-int(model.config.vocab_size) // places.tp_size)
    return rows * places.tp_size


def _layers(
    config: TransformerConfig, model: PreTrainedModel, vp_stage: int | None, pp_rank: int
) -> TransformerBlockSubmodules:
    offset = get_transformer_layer_offset(config, vp_stage, pp_rank)
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    specs = [
        _layer(config, has_experts(model.config, layer)) for layer in range(offset, offset + count)
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def _layer(config: TransformerConfig, with_experts: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if with_experts else None,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if with_experts:
        spec.submodules.mlp.submodules.router = Router
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec
