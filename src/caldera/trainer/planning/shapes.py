"""The sizes of a model that decide how much memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedConfig

from caldera.errors import UnsupportedError
from caldera.models.flops import Arithmetic
from caldera.models.forward import base_module


@dataclass(frozen=True)
class ModelShape:
    """Counts and widths; bytes are somebody else's."""

    parameters: int
    trained: int
    """Those that are not frozen."""
    matrices: int
    """Parameters of the decoder layers' matrices: those that are cast where computation is in
    another precision than they are kept in."""
    embeddings: int
    """Parameters of the input embedding, and of the language head where that is not the same."""
    head: int
    """Parameters of the language head; 0 for a classifier."""
    layers: int
    hidden: int
    inner: int
    """Width between the matrices of a gated layer."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    """Whether the language head is the input embedding."""

    @classmethod
    def of(cls, module: nn.Module) -> ModelShape:
        """Of a module that may be on the meta device."""
        model = base_module(module)
        whole: PreTrainedConfig = model.config
        config = whole.get_text_config()
        if not Arithmetic.of(module).is_known or not hasattr(config, "intermediate_size"):
            raise UnsupportedError(
                f"{type(model).__name__}: memory is worked out for dense decoders alone, not for "
                "mixtures of experts"
            )
        parameters = list(module.parameters())
        head = model.get_output_embeddings()
        tables = [cast(Tensor, part.weight) for part in (model.get_input_embeddings(), head)
                  if part is not None]  # fmt: skip
        embeddings = {id(table): table.numel() for table in tables}
        count = sum(parameter.numel() for parameter in parameters)
        vectors = sum(parameter.numel() for parameter in parameters if parameter.dim() < 2)
        heads = config.num_attention_heads
        return cls(
            parameters=count,
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            matrices=count - sum(embeddings.values()) - vectors,
            embeddings=sum(embeddings.values()),
            head=0 if head is None else head.weight.numel(),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=0 if head is None else config.vocab_size,
            is_tied=head is not None and len(embeddings) == 1,
        )

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of the keys of a token, and as much again of its values."""
        return self.kv_heads * self.head_dim

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer's matrices."""
        return self.matrices // self.layers
