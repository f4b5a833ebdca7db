"""Adapters on their way to an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from caldera.errors import RolloutError
from caldera.models.loading import exported_weights
from caldera.rollout import ROLLOUTS
from caldera.rollout.engines.host.caldera_engine.buckets import ADAPTER_FILE, check_adapter
from caldera.rollout.engines.options import engine_arguments
from caldera.rollout.engines.weights import (
    AdapterFolders,
    EngineWeights,
    ModuleWeights,
    WeightFiles,
    adapter_shape,
    why_merged,
)

CPU = torch.device("cpu")


def test_a_written_adapter_is_one_of_peft(adapted: Any, build_model: Any, tmp_path: Path) -> None:
    for weight in adapted.parameters():
        torch.nn.init.normal_(weight.data, std=0.3)
    shape = adapter_shape(adapted)
    assert shape is not None and shape.rank == 3
    assert shape.settings["target_modules"] == ["q_proj", "up_proj"]
    folders = AdapterFolders(shape, tmp_path)
    source = ModuleWeights(adapted)
    folders.write(source.adapter_weights())
    assert folders.newest is not None
    base = build_model("llama")
    base.load_state_dict(dict(source.export_weights(merged=False)))
    again = peft.PeftModel.from_pretrained(base, folders.newest["path"])
    ours, theirs = dict(exported_weights(again)), dict(exported_weights(adapted))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    file = Path(folders.newest["path"]) / ADAPTER_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="checksum"):
        check_adapter(folders.newest)


def test_what_cannot_be_an_adapter_is_merged(build_model: Any, config: Any) -> None:
    def why(name: str = "vllm", **settings: Any) -> str | None:
        told = {"r": 3, "target_modules": ["q_proj"], **settings}
        module = peft.get_peft_model(build_model("llama"), peft.LoraConfig("CAUSAL_LM", **told))
        shape = adapter_shape(module)
        assert shape is not None
        return why_merged(name, module, shape)

    assert why() is None
    assert why(rank_pattern={"0.self_attn.q_proj": 4}, use_rslora=True) is None
    assert "whole layers" in str(why(modules_to_save=["lm_head"]))
    assert "other layers" in str(why(target_modules=["embed_tokens"]))
    assert why(r=512) is None
    assert "its rank is 513" in str(why(rank_pattern={"0.self_attn.q_proj": 513}))
    assert "vLLM alone" in str(why("sglang"))


@pytest.mark.parametrize("kind", [RolloutError, RuntimeError, ValueError])
def test_errors_with_an_adapter_say_how_to_do_without(
    adapted: Any, config: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(*_: Any) -> None:
        raise kind("no adapters for this model")

    monkeypatch.setattr("caldera.rollout.engines.rollout.EngineProcess", refuse)
    key = r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.enable_lora=False"
    asked = config(name="vllm", engine_python="python")
    with pytest.raises(RolloutError, match=rf"no adapters for this model\n.*{key}"):
        ROLLOUTS["vllm"](asked, adapted, CPU)
    merged = config(
        name="vllm", engine_python="python", engine_kwargs={"vllm": {"enable_lora": False}}
    )
    with pytest.raises(kind, match=r"no adapters for this model$"):
        ROLLOUTS["vllm"](merged, adapted, CPU)
    shape = adapter_shape(adapted)
    assert shape is not None
    folders = AdapterFolders(shape)
    weights = EngineWeights(1, WeightFiles(torch.float32, 1 << 20), folders)
    weights.take(ModuleWeights(adapted))
    engine: Any = SimpleNamespace(load_bucket=lambda *_: None, use_weights=refuse)
    with pytest.raises(RolloutError, match=key):
        weights.push(0, engine, 1)
    weights.close()


def test_engines_are_told_of_adapters(adapted: Any, config: Any) -> None:
    shape = adapter_shape(adapted)
    vllm = engine_arguments("vllm", config(), "/m", None, shape)
    assert (vllm["enable_lora"], vllm["max_lora_rank"], vllm["max_loras"]) == (True, 3, 1)
    assert "enable_lora" not in engine_arguments("vllm", config(), "/m", None)
    assert "enable_lora" not in engine_arguments("sglang", config(), "/m", None)
