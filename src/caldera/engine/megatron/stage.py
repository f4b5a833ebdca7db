"""One stage of a model in Megatron's layers, and its outputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
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
from torch.nn import functional as F
from transformers import PreTrainedModel

from caldera.engine.base import ForwardPlan, Outputs
from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.shape import has_experts
from caldera.engine.packed_model import PackedRows
from caldera.models.attention import AttentionContext, AttentionLayer
from caldera.models.head import VocabularyPart, head_outputs
from caldera.models.pretrained import VALUE_HEAD

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
    part = None
    if is_cut:
        start = places.tp_rank * len(weight)
        size = min(max(words - start, 0), len(weight))
        part = VocabularyPart(start, size, places.tp_group)
    found = head_outputs(chosen, weight, packed.labels, plan.temperature, plan.outputs, part)
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
        layer = AttentionLayer(self, self._scale, None)
        attended = context.attend(layer, query, key, value.contiguous())
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
