"""Models without values: every parameter of the source is that of the model loaded whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from caldera.config import ModelConfig
from caldera.errors import ConfigError
from caldera.models.forward import base_module
from caldera.models.loading import (
    Built,
    build_policy,
    build_reward_model,
    build_sequence_classifier,
    build_value_model,
)

KEY = "actor_rollout_ref.model"
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma3_text tied": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
Build = Callable[[torch.dtype, bool], Built]
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a random model, its weights in one file or in several; to be read only."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(kind: str, factory: Any = AutoModelForCausalLM, files: str = "one") -> Path:
        place = (kind, factory, files)
        if place not in made:
            made[place] = tmp_path_factory.mktemp("model")
            _save(made[place], kind, factory, files)
        return made[place]

    return make


def _save(path: Path, kind: str, factory: Any, files: str, **more: Any) -> None:
    config = AutoConfig.for_model(
        kind.partition(" ")[0], **{**SIZES, **TYPES.get(kind, {}), **more}
    )
    if factory is AutoModelForSequenceClassification:
        config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = factory.from_config(config)
    model.save_pretrained(path, max_shard_size="20KB" if files == "several" else "1GB")
    assert len(list(path.glob("*.safetensors"))) == 1 or files == "several"
    assert (path / "model.safetensors.index.json").exists() == (files == "several")


def policy(path: Path | str, **keys: Any) -> Build:
    config = ModelConfig(path=str(path), **keys)
    return lambda dtype, empty: build_policy(config, dtype, 7, KEY, empty)


def critic(path: Path | str, **keys: Any) -> Build:
    config = ModelConfig(path=str(path), **keys)
    return lambda dtype, empty: build_value_model(config, dtype, 7, "critic.model", empty)


def reward_model(path: Path | str) -> Build:
    config = ModelConfig(path=str(path))
    return lambda dtype, empty: build_reward_model(config, dtype, "reward_model.model", empty)


def judge_to_be(path: Path | str, **keys: Any) -> Build:
    config = ModelConfig(path=str(path), **keys)
    return lambda dtype, empty: build_sequence_classifier(config, dtype, 7, "model", empty)


def assert_same(build: Build, dtype: torch.dtype = torch.float32) -> Built:
    """Shape, tying, buffers and values of the empty model are those of the whole one."""
    before = torch.get_rng_state()
    whole, empty = build(dtype, False), build(dtype, True)
    assert torch.equal(torch.get_rng_state(), before)
    assert whole.source is None and empty.source is not None
    assert all(p.is_meta for p in empty.module.parameters())
    assert described(empty.module) == described(whole.module)
    for name, buffer in whole.module.named_buffers():
        assert torch.equal(empty.module.get_buffer(name), buffer), name
    assert empty.source.names() == [name for name, _ in whole.module.named_parameters()]
    for name, parameter in whole.module.named_parameters(remove_duplicate=False):
        value = empty.source.tensor(name)
        assert value.dtype == parameter.dtype and torch.equal(value, parameter), name
    assert torch.equal(torch.get_rng_state(), before)
    return empty


def described(module: nn.Module) -> dict[str, Any]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    model = base_module(module)
    return {
        "parameters": {n: (p.shape, p.dtype, p.requires_grad) for n, p in parameters.items()},
        "tied": [name for name in parameters if name not in dict(module.named_parameters())],
        "buffers": {n: (b.shape, b.dtype, b.device) for n, b in module.named_buffers()},
        "state": list(module.state_dict()),
        "training": module.training,
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict() if model.can_generate() else None,
        "class": type(model),
        "name": model.name_or_path,
    }


@pytest.fixture
def direct(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Whether no model was held whole so far."""
    return lambda: "kept in host memory" not in caplog.text


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("kind", TYPES)
def test_policies(
    folder: Folder, direct: Callable[[], bool], kind: str, lora_rank: int, files: str
) -> None:
    empty = assert_same(policy(folder(kind, files=files), lora_rank=lora_rank))
    tied = described(empty.module)["tied"]
    assert bool(tied) == kind.endswith("tied")
    assert direct()


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("kind", [kind for kind in TYPES if not kind.startswith("gemma3")])
def test_critics(
    folder: Folder, direct: Callable[[], bool], kind: str, lora_rank: int, files: str
) -> None:
    assert_same(critic(folder(kind, files=files), lora_rank=lora_rank))
    assert direct()


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("kind", TYPES)
def test_reward_models(folder: Folder, direct: Callable[[], bool], kind: str, files: str) -> None:
    path = folder(kind, AutoModelForSequenceClassification, files)
    assert_same(reward_model(path))
    assert direct()


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("kind", TYPES)
def test_reward_models_to_be(
    folder: Folder, direct: Callable[[], bool], kind: str, lora_rank: int, files: str
) -> None:
    assert_same(judge_to_be(folder(kind, files=files), lora_rank=lora_rank))
    assert direct()


def test_bfloat16(folder: Folder, direct: Callable[[], bool]) -> None:
    half = torch.bfloat16
    assert_same(policy(folder("gemma3_text tied"), lora_rank=2), half)
    assert_same(critic(folder("qwen2"), lora_rank=2), half)
    judge = assert_same(reward_model(folder("llama", AutoModelForSequenceClassification)), half)
    assert judge.source.tensor("score.weight").dtype == torch.float32
    judge = assert_same(judge_to_be(folder("llama")), half)
    assert judge.source.tensor("score.weight").dtype == torch.float32
    assert direct()


def test_a_critic_that_starts_from_a_reward_model(
    folder: Folder, direct: Callable[[], bool]
) -> None:
    path = folder("qwen2", AutoModelForSequenceClassification)
    built = assert_same(critic(path))  # its head has a bias, that of the reward model has none
    held = load_file(path / "model.safetensors")["score.weight"]
    assert torch.equal(built.source.tensor("score.weight"), held)
    assert direct()


def test_fresh_values_depend_on_seed_and_name_alone(folder: Folder) -> None:
    def values(kind: str, seed: int, **keys: Any) -> dict[str, torch.Tensor]:
        config = ModelConfig(path=str(folder(kind)), lora_rank=2, **keys)
        source = build_value_model(config, torch.float32, seed, KEY, empty=True).source
        return {n: source.tensor(n) for n in source.names() if "lora_A" in n or "score" in n}

    every, same = values("llama", 1), values("qwen2", 1, target_modules=["q_proj", "v_proj"])
    other = values("llama", 2)
    assert len(every) > len(same)
    assert all(torch.equal(every[name], value) for name, value in same.items())
    drawn = [value for value in every.values() if value.any()]
    assert len(drawn) == 16, "A of seven projections in two layers, the head twice; biases are zero"
    assert len({value.sum().item() for value in drawn}) == 15, "the head's copy is the head"
    assert not any(torch.equal(every[n], v) for n, v in other.items() if v.any())


def test_values_are_drawn_as_transformers_and_peft_draw_them(folder: Folder) -> None:
    config = ModelConfig(path=str(folder("llama")), lora_rank=8)
    config.override_config = {"initializer_range": 0.5}
    source = build_value_model(config, torch.float32, 1, KEY, empty=True).source
    prefix = "base_model.model."
    head = source.tensor(f"{prefix}score.original_module.weight")
    assert 0.3 < head.std() < 0.7
    layer = f"{prefix}model.layers.0.mlp.down_proj"
    a, b = (source.tensor(f"{layer}.lora_{x}.default.weight") for x in "AB")
    assert 0.9 / 8 < a.abs().max() <= 1 / 8, "uniform, within one over the root of 64 inputs"
    assert not b.any()


def test_values_stay_what_they_are_when_the_module_changes(folder: Folder) -> None:
    built = critic(folder("llama"), lora_rank=2)(torch.bfloat16, True)
    names = [name for name in built.source.names() if "score" in name or "lora_A" in name]
    before = {name: built.source.tensor(name) for name in names}
    built.module.double()
    assert all(torch.equal(built.source.tensor(name), value) for name, value in before.items())
    assert {value.dtype for value in before.values()} == {torch.bfloat16, torch.float32}


def test_a_generation_config_comes_along(folder: Folder, tmp_path: Path) -> None:
    _save(tmp_path, "llama", AutoModelForCausalLM, "one")
    GenerationConfig(eos_token_id=[2, 5], temperature=0.5, do_sample=True).save_pretrained(tmp_path)
    built: Any = assert_same(policy(tmp_path))
    assert built.module.generation_config.eos_token_id == [2, 5]
    (tmp_path / "generation_config.json").unlink()
    built = assert_same(policy(tmp_path))
    assert built.module.generation_config.eos_token_id == 2


def test_tied_weights_that_the_files_hold_twice(tmp_path: Path, direct: Callable[[], bool]) -> None:
    _save(tmp_path, "qwen2 tied", AutoModelForCausalLM, "one")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, file, {"format": "pt"})
    assert_same(policy(tmp_path))  # under the other name alone
    state["model.embed_tokens.weight"] = state["lm_head.weight"].clone()
    save_file(state, file, {"format": "pt"})
    assert_same(policy(tmp_path))
    assert direct()
    state["lm_head.weight"] += 1  # two different weights: transformers does not tie them
    save_file(state, file, {"format": "pt"})
    assert "tied" in described(assert_same(policy(tmp_path)).module)
    assert not direct()


def test_files_that_are_not_safetensors(folder: Folder, tmp_path: Path, direct: Any) -> None:
    source = folder("llama")
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    assert_same(policy(tmp_path, lora_rank=2))
    assert_same(critic(tmp_path, lora_rank=2))
    assert not direct()


def test_weights_that_transformers_merges(tmp_path: Path, direct: Any) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    _save(tmp_path, "qwen3_moe", AutoModelForCausalLM, "one", **experts)
    names = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    built = assert_same(policy(tmp_path))
    assert "model.layers.0.mlp.experts.gate_up_proj" in built.source.names()
    assert not direct()


@pytest.mark.parametrize("files", ["one", "several"])
def test_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: Callable[[], bool], files: str
) -> None:
    commit = "0" * 40
    repository = tmp_path / "models--someone--model"
    _save(repository / "snapshots" / commit, "llama", AutoModelForCausalLM, files)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert_same(policy("someone/model"))
    assert direct()
    with pytest.raises(ConfigError, match=rf"^{KEY}\.path='someone/other': no model could"):
        policy("someone/other")(torch.float32, True)


@pytest.mark.parametrize("empty", [False, True])
def test_reward_models_are_checked(folder: Folder, tmp_path: Path, empty: bool) -> None:
    def build(path: Path) -> Built:
        return reward_model(path)(torch.float32, empty)

    key = r"^reward_model\.model\.path='.*'"
    with pytest.raises(ConfigError, match=rf"{key} is no trained .* files lack score\.weight$"):
        build(folder("qwen2"))
    _save(tmp_path, "llama", partial_labels(3), "one")
    with pytest.raises(ConfigError, match=rf"{key} has 3 labels"):
        build(tmp_path)
    with pytest.raises(ConfigError, match=rf"{key}: there is no such folder$"):
        build(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=rf"{key}: no model could be loaded: "):
        build(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"{key}: no model could be loaded: "):
        build(tmp_path)


def partial_labels(labels: int) -> Any:
    """A factory of classifiers with so many labels."""

    class Factory:
        @staticmethod
        def from_config(config: Any) -> Any:
            config.num_labels = labels
            return AutoModelForSequenceClassification.from_config(config)

    return Factory


@pytest.mark.parametrize("empty", [False, True])
def test_a_head_of_another_shape(tmp_path: Path, empty: bool) -> None:
    _save(tmp_path, "llama", partial_labels(3), "one")
    shapes = r"score\.weight is \(3, 32\) in its files and \(1, 32\) in the model"
    with pytest.raises(ConfigError, match=rf"^critic\.model\.path=.*: {shapes}$"):
        critic(tmp_path)(torch.float32, empty)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    _save(tmp_path, "llama", AutoModelForCausalLM, "several")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / index["weight_map"]["lm_head.weight"]).unlink()
    with pytest.raises(ConfigError, match=rf"^{KEY}\.path='.*': no model could be loaded: "):
        policy(tmp_path)(torch.float32, True)


def test_an_unknown_key_of_the_config(folder: Folder) -> None:
    with pytest.raises(ConfigError, match=rf"^{KEY}\.override_config: .* has no depht$"):
        policy(folder("llama"), override_config={"depht": 3})(torch.float32, True)
