"""Which Hugging Face models can be run on packed tokens, in training and in sampling.

Whatever would compute something else there than alone is refused by name. That each layer attends
once is seen when a model is first sampled from (`KVCache.check_pass`).
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from caldera.errors import UnsupportedError
from caldera.models.forward import base_module

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
WINDOWS_IN_MASKS = ("moshi", "phimoe")
"""Kinds of models whose windows are in their masks alone, which are not built here."""
LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


def refuse_other_models(module: nn.Module) -> None:
    model = base_module(module)
    name, text = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(f"{name} does not use the attention interface of transformers")
    others = set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS
    if others:
        raise UnsupportedError(
            f"{name} has layers of the type {', '.join(sorted(others))}; "
            f"takes {', '.join(sorted(KNOWN_LAYERS))}"
        )
    window = getattr(text, "sliding_window", None)
    if text.model_type in WINDOWS_IN_MASKS and window is not None:
        raise UnsupportedError(f"{name} with sliding_window={window}: not supported; takes null")
    _refuse_other_heads(model)


def _refuse_other_heads(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    if head is None:  # a value head, say
        return
    known = {id(each) for part in (model.base_model, head) for each in part.parameters()}
    others = [name for name, each in model.named_parameters() if id(each) not in known]
    if others:
        raise UnsupportedError(
            f"{type(model).__name__} has more than a matrix between its last hidden states and "
            f"its logits ({', '.join(others[:3])}): not supported"
        )


def rope_kind(module: nn.Module) -> str:
    """The kind of the model's rotary embedding; "default" if it has none."""
    for part in base_module(module).modules():
        kind = getattr(part, "rope_type", None)
        if isinstance(kind, str):
            return kind
    return "default"


def refuse_longer(module: nn.Module, longest: int, key: str) -> None:
    """Refuse sequences at which the model becomes another one; `key`: what asks for so many tokens.

    Rotary embeddings of some kinds do so for all sequences that run together.
    """
    model = base_module(module)
    name, text = type(model).__name__, model.config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or longest
    kind = rope_kind(module)
    reason = f"the rotary embedding ({kind}) of {name} is another one beyond that"
    if any(_are_positions(path, part) for path, part in model.base_model.named_modules()):
        reason = f"{name} has learned no more positions"
    elif kind == "longrope":
        most = dict(text.rope_parameters).get("original_max_position_embeddings") or most
    elif kind != "dynamic":
        return
    if longest > most:
        raise UnsupportedError(f"{key}={longest}: {reason}; takes at most {most}")


def _are_positions(path: str, part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding) and path.rpartition(".")[2] in LEARNED_POSITIONS
