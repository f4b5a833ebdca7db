"""What ranks do in these tests: small models, a batch, and five steps of training on a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from caldera.config import FSDPConfig, OptimizerConfig
from caldera.config.megatron import MegatronConfig
from caldera.core_algos import LossScale
from caldera.engine import ENGINES, Engine, EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.models.attention import ATTENTION
from caldera.models.pretrained import WeightSource, take_values
from caldera.protocol import DataProto

HOST = torch.device("cpu")
P, R, ROWS, STEPS = 4, 8, 8, 5
PROMPTS = [4, 3, 1, 2, 2, 4, 3, 1]  # tokens of each row
ANSWERS = [8, 7, 1, 2, 3, 8, 5, 0]
SIZES: dict[str, Any] = {
    "vocab_size": 49,  # which no number of ranks divides
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "qwen3_moe": {"head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True, **EXPERTS},
    "qwen3_moe-unscaled": {"head_dim": 16, "norm_topk_prob": False, **EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
KINDS = {
    "actor": AutoModelForCausalLM,
    "critic": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}


def make_model(family: str, kind: str) -> Any:
    labels = {} if kind == "actor" else {"num_labels": 1}
    sizes = {**SIZES, **FAMILIES[family], **labels}
    config = AutoConfig.for_model(family.partition("-")[0], **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = KINDS[kind].from_config(config, attn_implementation=ATTENTION)
        for parameter in model.parameters():  # so that norms and biases are not all alike
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.1)
    return model.eval()


def make_batch() -> DataProto:
    """Eight rows with all that an update reads; one has no answer."""
    generator = torch.Generator().manual_seed(4)
    before = torch.arange(P) >= P - torch.tensor(PROMPTS)[:, None]
    mask = (torch.arange(R) < torch.tensor(ANSWERS)[:, None]).long()
    attention = torch.cat([before.long(), mask], 1)
    input_ids = torch.randint(3, 49, (ROWS, P + R), generator=generator)
    input_ids[0, P + 2] = 0  # a padding token that was sampled: its embedding gets no gradient

    def normal(mean: float, spread: float) -> Tensor:
        return mean + spread * torch.randn(ROWS, R, generator=generator)

    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "responses": input_ids[:, P:],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "old_log_probs": normal(-3.9, 0.3),
            "advantages": normal(0, 1),
            "returns": normal(0, 1),
        }
    )


def policy_loss(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    mask = rows.batch["response_mask"]
    ratio = torch.exp(outputs["log_probs"] - rows.batch["old_log_probs"] * mask)
    gain = rows.batch["advantages"]
    worst = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    loss = scale.aggregate(worst, mask, "token-mean")
    entropy = scale.aggregate(outputs["entropy"], mask, "seq-mean-token-mean")
    return loss - 0.02 * entropy, {"loss": loss.detach(), "entropy": entropy.detach()}


def value_loss(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    error = (outputs["values"] - rows.batch["returns"]).square()
    loss = scale.aggregate(error, rows.batch["response_mask"], "token-mean")
    return loss, {"loss": loss.detach()}


LOSSES: dict[str, Callable[..., Any]] = {"actor": policy_loss, "critic": value_loss}
PLANS = {
    "actor": ForwardPlan(("log_probs", "entropy"), True, None, P + R, temperature=0.7),
    "critic": ForwardPlan(("values",), True, None, P + R),
    "reward": ForwardPlan(("scores",), True, None, P + R),
}
OPTIM = {
    # With a large epsilon: else Adam makes whole steps of gradients that are nothing but rounding.
    "adam": OptimizerConfig(
        lr=1e-3, weight_decay=0.1, total_training_steps=10, override_optimizer_config={"eps": 1e-5}
    ),
    "sgd": OptimizerConfig(
        optimizer="SGD", lr=0.2, weight_decay=0.01, lr_warmup_steps=2, total_training_steps=10,
        override_optimizer_config={"momentum": 0.9},
    ),
}  # fmt: skip
MEMORY = FSDPConfig(model_dtype="fp32", dtype="float32")


def options_of(kind: str, megatron: MegatronConfig | None, optim: str) -> EngineOptions:
    config = None if kind == "reward" else OPTIM[optim]
    return EngineOptions(MEMORY, config, grad_clip=0.5, megatron=megatron)


def build_local(family: str, kind: str, optim: str = "adam") -> Engine:
    options = options_of(kind, None, optim)
    return LocalEngine(make_model(family, kind), HOST, options)


def source_of(model: nn.Module) -> WeightSource:
    """Leaves the model without values."""
    values = take_values(model)
    return WeightSource(model, {name: partial(values.__getitem__, name) for name in values})


def build_megatron(family: str, kind: str, layout: dict[str, Any], optim: str = "adam") -> Engine:
    model = make_model(family, kind)
    config = MegatronConfig(**{"dtype": "float32", **layout})
    return ENGINES["megatron"](model, source_of(model), HOST, options_of(kind, config, optim))


def own_rows(engine: Engine) -> DataProto:
    share = ROWS // engine.dp_size
    return make_batch().select_idxs(
        list(range(engine.dp_rank * share, (engine.dp_rank + 1) * share))
    )


def said(engine: Engine, kind: str) -> dict[str, Tensor]:
    plan = PLANS[kind]
    if kind == "actor":
        plan = replace(plan, outputs=("log_probs", "entropy", "sum_pi_squared"))
    return {str(name): value for name, value in engine.infer(own_rows(engine), plan).items()}


def trial(engine: Engine, kind: str, rests: bool = False, **changes: Any) -> dict[str, Any]:
    """Everything that there is to compare. With `rests`, memory is given back between steps."""
    found: dict[str, Any] = {
        "place": (engine.dp_rank, engine.dp_size, engine.is_dp_leader, engine.model_parallel_size),
        "first": said(engine, kind),
    }
    if kind == "reward":
        return found
    plan = replace(PLANS[kind], **changes)
    found["curve"] = []
    found["rates"] = []
    for _ in range(STEPS):
        if rests:
            engine.offload()
            engine.onload(optimizer=True)
        metrics = engine.train(own_rows(engine), LOSSES[kind], plan)
        found["curve"].append({name: float(value) for name, value in metrics.items()})
        found["rates"].append(engine.step_schedule())
    found["last"] = said(engine, kind)
    found["weights"] = {name: tensor.detach().clone() for name, tensor in engine.export_weights()}
    return found
