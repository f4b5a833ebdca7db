"""Predicted memory against peaks that were measured on a GPU, and against numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from caldera.commands.plan_memory import (
    Held,
    ModelShape,
    Pass,
    Sampler,
    inference,
    sampling,
    training,
)
from caldera.config import FSDPConfig, ModelConfig, OptimizerConfig
from caldera.core_algos import LossScale
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.errors import UnsupportedError
from caldera.models.loading import shape_of_classifier, shape_of_policy
from caldera.protocol import DataProto

GIB = 2**30
BF16, FP32 = 2, 4
MEASURED: list[tuple[str, int, int, bool, dict[str, bool], float]] = [
    ("0.5B", BF16, 32768, False, {}, 34.5),
    ("0.5B", BF16, 16384, True, {}, 21.1),
    ("0.5B", FP32, 32768, False, {}, 40.3),
    ("0.5B", FP32, 16384, True, {}, 27.1),
    ("1.5B", BF16, 32768, False, {}, 74.1),
    ("1.5B", FP32, 32768, False, {}, 88.3),
    ("0.5B", FP32, 30016, False, {}, 37.0),
    ("0.5B", FP32, 30016, False, {"checkpoints": True}, 0.28 * 37.0),
    ("0.5B", FP32, 30016, False, {"compiles": False}, 1.44 * 37.0),
    ("0.5B", FP32, 30016, False, {"activation_offload": True}, 0.24 * 37.0),
]
"""(shape, bytes of a parameter, tokens of a micro-batch, more than one of them, how it is held, GiB
at the peak of training): docs/performance.md#training, NVIDIA H200."""


@pytest.fixture(scope="module")
def shapes(config_folder: Callable[..., str]) -> dict[str, ModelShape]:
    return {
        name: ModelShape.of(shape_of_policy(ModelConfig(path=config_folder(name)), "model"))
        for name in ("0.5B", "1.5B")
    }


def test_the_shape_of_a_known_model(shapes: dict[str, ModelShape]) -> None:
    shape = shapes["0.5B"]
    matrices = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    vectors = 24 * (896 + 2 * 128 + 2 * 896) + 896  # biases of query, key and value; norms
    assert shape.parameters == shape.trained == matrices + vectors + 151936 * 896
    assert (shape.matrices, shape.head) == (matrices, 151936 * 896)
    assert (shape.attention_width, shape.kv_width) == (896, 128)


def test_a_head_of_its_own_counts_twice(config_folder: Callable[..., str]) -> None:
    folder = config_folder("0.5B", tie_word_embeddings=False)
    shape = ModelShape.of(shape_of_policy(ModelConfig(path=folder), "model"))
    assert shape.embeddings == 2 * shape.head


def test_a_classifier_has_no_language_head(config_folder: Callable[..., str]) -> None:
    model = ModelConfig(path=config_folder("0.5B"))
    shape = ModelShape.of(shape_of_classifier(model, "critic.model"))
    assert (shape.head, shape.vocabulary) == (0, 0)
    held = Held(shape, FP32, BF16)
    assert training(held, Pass(100, 100))["activations"] < GIB


def test_an_adapter_is_all_that_is_trained(config_folder: Callable[..., str]) -> None:
    pytest.importorskip("peft")
    model = ModelConfig(path=config_folder("0.5B"), lora_rank=4)
    shape = ModelShape.of(shape_of_policy(model, "model"))
    sides = 2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)
    assert shape.trained == 24 * 4 * sides


def test_experts_are_refused(tiny_model: Callable[..., PreTrainedModel]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=48,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match=r"MixtralForCausalLM: .*mixtures of experts"):
        ModelShape.of(model)


@pytest.mark.parametrize(("name", "kept", "tokens", "accumulates", "how", "gib"), MEASURED)
def test_training_is_near_what_was_measured(
    shapes: dict[str, ModelShape], name: str, kept: int, tokens: int, accumulates: bool,
    how: dict[str, Any], gib: float,
) -> None:  # fmt: skip
    held = Held(shapes[name], kept, BF16, **how)
    predicted = sum(training(held, Pass(tokens, tokens, accumulates)).values())
    assert predicted / GIB == pytest.approx(gib, rel=0.15)


def test_sharding_and_offloading_take_less(shapes: dict[str, ModelShape]) -> None:
    whole = Held(shapes["0.5B"], FP32, BF16)
    work = Pass(4096, 2048, True)
    sharded = training(replace(whole, shards=4), work)
    assert sharded["weights"] == -(-training(whole, work)["weights"] // 4)
    offloaded = replace(whole, param_offload=True, optimizer_offload=True)
    assert sum(offloaded.resident.values()) == 0
    assert sum(inference(offloaded, work).values()) < sum(inference(whole, work).values())
    assert training(offloaded, work) == training(whole, work)


def test_the_cache_of_the_sampler(shapes: dict[str, ModelShape]) -> None:
    sampler = Sampler(shapes["0.5B"], BF16, True, 1000, 100, 60, 64, 8192)
    page = 2 * 24 * 16 * 128 * 2
    assert sampler.page_bytes == page
    assert sampling(sampler)["key/value cache"] == 64 * 10 * page
    assert sampling(sampler, 25 * page + 1)["key/value cache"] == 25 * page
    assert sampling(sampler, -5)["key/value cache"] == 0
    fixed = replace(sampler, pages=7)
    assert sampling(fixed, 0)["key/value cache"] == 7 * page
    assert sampling(replace(sampler, copies_weights=False))["sampler's weights"] == 0


def test_a_checkpoint_is_as_large_as_predicted(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = tiny_model("qwen2", hidden_size=256, intermediate_size=1024, vocab_size=512)
    shape = ModelShape.of(model)
    engine = LocalEngine(model, torch.device("cpu"), EngineOptions(FSDPConfig(), OptimizerConfig()))
    ids = torch.ones(2, 4, dtype=torch.long)
    rows = DataProto.from_dict(
        {"input_ids": ids, "responses": ids[:, 2:], "attention_mask": ids,
         "response_mask": ids[:, 2:]}
    )  # fmt: skip

    def loss(
        outputs: Outputs, rows: DataProto, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return outputs["log_probs"].sum(), {}

    engine.train(rows, loss, ForwardPlan(("log_probs",), False, 2, None))
    engine.save(tmp_path, ["model", "optimizer"])
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    held = Held(shape, FP32, FP32)
    predicted = held.saved("model") + held.saved("optimizer")
    assert predicted == 4 * (3 * shape.parameters + 512 * 256)
    assert written == pytest.approx(predicted, rel=0.01)
