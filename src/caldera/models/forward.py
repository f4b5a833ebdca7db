"""Running a Hugging Face module on packed tokens: backbone, language head, value head."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from caldera.errors import UnsupportedError
from caldera.protocol import DataProto, tensors_of

if TYPE_CHECKING:
    from caldera.models.attention import AttentionContext


def base_module(module: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a peft wrapper, or the module itself.

    peft replaces layers in place, so that the inner model's forward includes the adapters.
    """
    get_base_model = getattr(module, "get_base_model", None)
    inner = get_base_model() if callable(get_base_model) else module
    return cast(PreTrainedModel, inner)


def without_adapter(module: nn.Module) -> AbstractContextManager[None]:
    """While entered, the module computes as if it had no adapter; without one nothing changes.

    To be left before any backward pass: adapters get no gradient meanwhile.
    """
    disable_adapter = getattr(module, "disable_adapter", None)
    if not callable(disable_adapter):
        return nullcontext()
    return cast(AbstractContextManager[None], disable_adapter())


def adapters_in_use(module: nn.Module) -> list[object]:
    """Which of its adapters each layer of a peft wrapper uses; empty without one."""
    if base_module(module) is module:
        return []
    return [
        (disabled, tuple(cast(list[str], part.active_adapters)))
        for part in module.modules()
        if isinstance(disabled := getattr(part, "_disable_adapters", None), bool)
    ]


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model, in order: what is compiled, gathered and dropped whole."""
    model = base_module(module)
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [part for part in model.modules() if type(part).__name__ in kinds]
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} does not name its decoder layers")
    return layers


def hidden_states(
    module: nn.Module, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """Last hidden states (T, H) of packed tokens; input_ids and position_ids are (1, T)."""
    backbone = base_module(module).base_model
    out = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, context=context)
    return cast(Tensor, out.last_hidden_state[0])


def language_head(module: nn.Module) -> Tensor:
    """The output embedding's weight, (V, H)."""
    model = base_module(module)
    head = model.get_output_embeddings()
    if hasattr(head, "base_layer"):
        raise UnsupportedError(
            "the language head cannot have an adapter: leave it out of model.target_modules"
        )
    if head is None or getattr(head, "bias", None) is not None:
        raise UnsupportedError(f"{type(model).__name__} has no bias-free language head")
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        raise UnsupportedError(f"{type(model).__name__} needs logit soft-capping: not supported")
    for name in ("logits_scaling", "logit_scale"):
        if getattr(model.config, name, None) not in (None, 1):
            raise UnsupportedError(f"{type(model).__name__} needs {name}: not supported")
    return cast(Tensor, head.weight)


def language_logits(module: nn.Module, hidden: Tensor) -> Tensor:
    """Float32 logits (N, V) of hidden states (N, H)."""
    return (hidden @ language_head(module).to(hidden.dtype).t()).float()


def value_scores(module: nn.Module, hidden: Tensor) -> Tensor:
    """Values (N,) of hidden states (N, H), in float32 or better, from a one-label classifier."""
    head = cast(nn.Module, base_module(module).score)
    hidden = hidden.to(cast(Tensor, head.weight).dtype)  # it may be more precise than the backbone
    values = cast(Tensor, head(hidden)).squeeze(-1)
    return values.to(torch.promote_types(values.dtype, torch.float32))


# ---- Handing tensors to a device without waiting for what it is doing


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the copy is queued behind the device's work, nobody waits."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_rows(rows: DataProto, device: torch.device) -> DataProto:
    """The tensors of rows on the device, sent in the same way."""
    if device.type == "cpu":
        return rows
    tensors = {
        key: send(value, device)
        for key, value in tensors_of(rows).items()
        if isinstance(value, Tensor)
    }
    return DataProto.from_dict(tensors, rows.non_tensor_batch, rows.meta_info)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. What leaves a GPU goes to pinned memory, from which it comes back
    many times as fast; before it is read there, somebody has to wait for the GPU."""
    if device.type != "cpu" or not tensor.is_cuda or type(tensor) is not Tensor:
        return tensor.to(device, non_blocking=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
