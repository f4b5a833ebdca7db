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
    assert shape is not None and (shape.rank, shape.targets) == (3, ["q_proj", "up_proj"])
    folders = AdapterFolders("vllm", shape, tmp_path)
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
    def why(name: str = "vllm", device: str = "cpu", **settings: Any) -> str | None:
        told = {"r": 3, "target_modules": ["q_proj"], **settings}
        module = peft.get_peft_model(build_model("llama"), peft.LoraConfig("CAUSAL_LM", **told))
        return why_merged(name, module, torch.device(device))

    assert why() is None
    assert why(rank_pattern={"0.self_attn.q_proj": 4}, use_rslora=True) is None
    assert "whole layers" in str(why(modules_to_save=["lm_head"]))
    assert "other layers" in str(why(target_modules=["embed_tokens"]))
    assert why(r=512) is None
    assert "its rank is 513" in str(why(rank_pattern={"0.self_attn.q_proj": 513}))
    every: Any = {"name": "sglang", "target_modules": "all-linear"}
    assert why(**every) is None and why(**every, r=513) is None
    assert why("sglang", target_modules=["q_proj", "v_proj", "o_proj", "gate_proj"]) is None
    assert "on CPUs alone" in str(why(**every, device="cuda"))
    assert "whole layers" in str(why(**every, modules_to_save=["lm_head"]))
    for other in ({"use_rslora": True}, {"alpha_pattern": {"o_proj": 4}}):
        assert "lora_alpha / lora_rank" in str(why(**every, **other))
    assert "self_attn.q_proj only beside v_proj" in str(why("sglang"))
    assert "mlp.up_proj only beside gate_proj" in str(why("sglang", target_modules=["up_proj"]))
    mixed = r"model\.layers\.(0\.self_attn\.q|1\.self_attn\.v)_proj"
    assert "layers.0.self_attn.q_proj only" in str(why("sglang", target_modules=mixed))
    assert "may not know lm_head" in str(why("sglang", target_modules=["lm_head"]))


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
    folders = AdapterFolders("vllm", shape)
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
    sglang = engine_arguments("sglang", config(), "/m", None, shape)
    assert (sglang["enable_lora"], sglang["max_lora_rank"]) == (True, 3)
    assert sglang["lora_target_modules"] == ["q_proj", "up_proj"]
    assert "enable_lora" not in engine_arguments("sglang", config(), "/m", None)
