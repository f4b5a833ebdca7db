"""What ranks find out besides: each returns the list of what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from caldera.config import FSDPConfig
from caldera.config.megatron import MegatronConfig, TransformerOverrides
from caldera.engine import ENGINES, Engine, EngineOptions
from caldera.errors import ConfigError
from caldera.models.head import HeadOutput, VocabularyPart, head_outputs
from tests.megatron.trials import (
    HOST,
    LOSSES,
    PLANS,
    STEPS,
    build_local,
    build_megatron,
    make_model,
    own_rows,
    said,
    source_of,
    trial,
)

PAIR: dict[str, Any] = {"tensor_model_parallel_size": 2}
CLASSIC: dict[str, Any] = {"by_tokens": False, "micro_batch_size": 3, "classic": True}
Expected = dict[str, Any]


def expected_of_plain_engines() -> Expected:
    """What a process finds that is alone; a plain engine among several would share its rows."""
    return {
        "values": said(build_local("qwen2", "critic"), "critic")["values"],
        "classic": trial(build_local("qwen3", "actor"), "actor", **CLASSIC)["curve"],
    }


def averages_of(engine: Engine) -> dict[str, Any]:
    """Adam's state of a plain engine by the names of its parameters."""
    optimizer = cast(Any, engine)._optimizer
    if optimizer is None:
        return {}
    state = {
        name: {key: torch.as_tensor(value).clone() for key, value in optimizer.state[p].items()}
        for name, p in engine.module.named_parameters(remove_duplicate=False)
    }
    return {"averages": state}


def look(engine: Any, alone: dict[str, Any]) -> dict[str, list[str]]:
    """Whether parts of weights and of the optimiser's state are those of the whole."""
    weights = engine.weights
    pieces = [piece for held in weights.pieces().values() for piece in held]
    expected_of = {piece: weights.part(piece, alone["weights"][piece.name]) for piece in pieces}
    wrong = [piece.name for piece in pieces if not _near(piece.read(), expected_of[piece])]
    wrong_averages, lost = [], []
    for piece in pieces:
        state = engine.optimizer.read_state(piece.parameter)
        expected = alone["averages"][piece.name]
        if state.keys() != expected.keys():
            wrong_averages.append(f"{piece.name}: {sorted(state)}, not {sorted(expected)}")
        for key, value in expected.items():
            own = piece.read(state[key]) if value.dim() else state[key]
            part = weights.part(piece, value) if value.dim() else value
            if not _near(own, part):
                wrong_averages.append(f"{piece.name} {key}")
        changed = {key: value + 1 for key, value in state.items()}
        engine.optimizer.write_state(piece.parameter, changed)
        again = engine.optimizer.read_state(piece.parameter)
        if any(not _near(again[key], value) for key, value in changed.items()):
            lost.append(piece.name)
        engine.optimizer.write_state(piece.parameter, state)
        main = engine.optimizer.read_main(piece.parameter)
        engine.optimizer.write_main(piece.parameter, main + 1)
        again = piece.read(), piece.read(engine.optimizer.read_main(piece.parameter))
        if any(not _near(one, piece.read(main + 1)) for one in again):
            lost.append(f"{piece.name} itself")
    return {"wrong shards": wrong, "wrong averages": wrong_averages, "lost in writing": lost}


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), 1e-4, 1e-5)


def a_head_that_is_cut(_: Expected) -> list[str]:
    """Against the whole head, in float64: outputs and gradients."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(13, 8, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 12, 6, 7, 3, 9])
    names: tuple[HeadOutput, ...] = ("log_probs", "entropy", "sum_pi_squared")
    whole = head_outputs(hidden, weight, labels, 0.6, names)
    slopes = torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def gradients(found: dict[Any, Tensor], *of: Tensor) -> list[Tensor]:
        total = (found["log_probs"] * slopes[0] + found["entropy"] * slopes[1]).sum()
        return list(torch.autograd.grad(total, of))

    rank = dist.get_rank()
    rows = weight.detach()[7 * rank : 7 * rank + 7]
    padded = torch.cat([rows, torch.full((7 - len(rows), 8), 9.0)]).double().requires_grad_()
    part = VocabularyPart(7 * rank, len(rows), dist.group.WORLD)
    found = head_outputs(hidden, padded, labels, 0.6, names, part)
    wrong: list[str] = [name for name in names if not torch.allclose(found[name], whole[name])]
    of_hidden, of_weight = gradients(whole, hidden, weight)
    part_of_hidden, of_rows = gradients(found, hidden, padded)
    dist.all_reduce(part_of_hidden)
    if not torch.allclose(part_of_hidden, of_hidden):
        wrong.append("gradient of hidden states")
    if not torch.allclose(of_rows[: len(rows)], of_weight[7 * rank : 7 * rank + 7]):
        wrong.append("gradient of the weight")
    if of_rows[len(rows) :].abs().sum() != 0:
        wrong.append("gradient of padding")
    return wrong


def what_is_refused(_: Expected) -> list[str]:
    """By name, on every rank alike."""
    wrong = []

    def expect(pattern: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except ConfigError as error:
            if not re.search(pattern, str(error)):
                wrong.append(f"{error} has no {pattern}")
        else:
            wrong.append(f"not refused: {pattern}")

    engine = build_megatron("qwen3", "actor", PAIR)
    full = replace(PLANS["actor"], outputs=("full_kl",), reference=engine)
    expect("kl_loss_type", lambda: engine.infer(own_rows(engine), full))
    expect("kl_loss_type", lambda: engine.frozen_states(cast(Any, None)))
    expect("another role on these ranks has 2", partial(build_megatron, "qwen3", "critic", {}))
    expect("use_distributed_optimizer", partial(build_megatron, "qwen3", "actor", PAIR, "sgd"))
    alone = PAIR | {"sequence_parallel": False}
    expect("sequence_parallel=False", partial(build_megatron, "mixtral", "actor", alone))
    expect("num_key_value_heads=1", partial(_build, num_key_value_heads=1))
    expect("hidden_act='gelu'", partial(_build, hidden_act="gelu"))
    expect("sliding", partial(_build, layer_types=["sliding_attention"] * 4))
    expect("'gemma' is not known; known are llama", partial(_build, model_type="gemma"))
    return wrong


def _build(**changes: Any) -> Engine:
    model = make_model("qwen3", "actor")
    source = source_of(model)
    for name, value in changes.items():
        setattr(model.config, name, value)
    config = MegatronConfig(dtype="float32", **PAIR)
    options = EngineOptions(FSDPConfig(), megatron=config)
    return ENGINES["megatron"](model, source, HOST, options)


def infinite_gradients(_: Expected) -> list[str]:
    """They change nothing, and are forgotten."""
    engine = build_megatron("qwen3", "actor", PAIR)
    before = dict(engine.export_weights())

    def infinite(*args: Any) -> Any:
        loss, metrics = LOSSES["actor"](*args)
        return loss * float("inf"), metrics

    metrics = engine.train(own_rows(engine), infinite, PLANS["actor"])
    wrong = [] if not metrics["grad_norm"].isfinite() else ["the norm is finite"]
    wrong += [
        name for name, value in engine.export_weights() if not torch.equal(value, before[name])
    ]
    after = engine.train(own_rows(engine), LOSSES["actor"], PLANS["actor"])
    return wrong if after["grad_norm"].isfinite() else [*wrong, "the next norm is not finite"]


def recomputed_layers(_: Expected) -> list[str]:
    """Whole layers or attention alone: the same steps."""
    found = []
    for told in (None, "full", "selective"):
        layout = PAIR | {"override_transformer_config": TransformerOverrides(told)}
        found.append(trial(build_megatron("qwen3", "actor", layout), "actor"))
    return [
        f"{name}, {told}"
        for told, other in zip(("full", "selective"), found[1:], strict=True)
        for name, value in other["weights"].items()
        if not torch.allclose(value, found[0]["weights"][name], 1e-5, 1e-6)
    ]


def half_precision(expected: Expected) -> list[str]:
    """Computes in bfloat16 and updates in float32: close to the plain engine, and it learns."""
    layout = PAIR | {"dtype": "bfloat16"}
    engine = build_megatron("qwen2", "critic", layout)
    found = trial(engine, "critic")
    values = found["first"]["values"]
    wrong = [] if torch.allclose(values, expected["values"], 0.1, 0.1) else ["values"]
    dtypes = {value.dtype for value in found["weights"].values()}
    if dtypes != {torch.bfloat16}:
        wrong.append(str(dtypes))
    losses = [step["loss"] for step in found["curve"]]
    return wrong if losses[STEPS - 1] < losses[0] else [*wrong, f"losses {losses}"]


def memory_that_is_given_back(_: Expected) -> list[str]:
    """All of it, where the config says so, and what comes back is what it was."""
    names = ("param_offload", "grad_offload", "optimizer_offload")
    engine: Any = build_megatron("qwen3", "actor", PAIR | dict.fromkeys(names, True))
    engine.train(own_rows(engine), LOSSES["actor"], PLANS["actor"])
    before = {name: value.clone() for name, value in engine.export_weights()}
    tensors = [p.data for stage in engine._stages for p in stage.parameters()]
    tensors += list(engine.optimizer.tensors())
    wrong = [] if len(tensors) > 100 else [f"{len(tensors)} tensors"]
    engine.offload()
    wrong += ["kept"] * sum(tensor.untyped_storage().nbytes() > 0 for tensor in tensors)
    engine.onload()
    wrong += [
        name for name, value in engine.export_weights() if not torch.equal(value, before[name])
    ]
    return wrong


def stand_ins_leave(_: Expected) -> list[str]:
    """Whoever else asks torch.cuda in this process gets its own answer."""
    from caldera.engine.megatron.cpu import STAND_INS

    build_megatron("llama", "critic", PAIR)
    left = [name for name, value in STAND_INS.items() if getattr(torch.cuda, name) is value]
    device = torch.overrides._get_current_function_mode_stack()
    return left if not device else [*left, "function mode"]


def classic_micro_batches(expected: Expected) -> list[str]:
    """Each averaged on its own, as in the plain engine."""
    found = trial(build_megatron("qwen3", "actor", PAIR), "actor", **CLASSIC)
    return [
        f"step {step}: {key}"
        for step, (one, other) in enumerate(zip(found["curve"], expected["classic"], strict=True))
        for key, value in other.items()
        if abs(one[key] - value) > 1e-5 * max(1, abs(value))
    ]


def mbridge_agrees(_: Expected) -> list[str]:
    """Another program reads the same Hugging Face tensors from the parameters of two ranks."""
    from mbridge import AutoBridge

    from caldera.engine.megatron.cpu import stand_ins

    wrong = []
    norms = {  # where there is no Transformer Engine, norms are apart from what follows them
        "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }
    for family in ("llama", "qwen3", "qwen2"):  # their tying is for all that come after
        engine: Any = build_megatron(family, "actor", PAIR)
        with stand_ins(HOST):
            bridge = AutoBridge.from_config(engine.module.config, dtype=torch.float32)
            bridge._OTHER_MAPPING = norms
            bridge._MLP_MAPPING = bridge._MLP_MAPPING | norms
            theirs = dict(bridge.export_weights(engine._stages))
        for name, value in make_model(family, "actor").named_parameters():
            # They know nothing of rows that were added to the vocabulary.
            if not torch.equal(theirs[name][: len(value)], value):
                wrong.append(f"{family} {name}")
    return wrong


PROBES: list[Callable[[Expected], list[str]]] = [
    a_head_that_is_cut,
    what_is_refused,
    infinite_gradients,
    recomputed_layers,
    half_precision,
    memory_that_is_given_back,
    stand_ins_leave,
    classic_micro_batches,
    *([mbridge_agrees] if find_spec("mbridge") and find_spec("einops") else []),
]
"""For two ranks."""
