"""Models from folders: policies, value models, adapters, and what they export."""

from __future__ import annotations

import builtins
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from caldera.config import ModelConfig
from caldera.errors import ConfigError, UnsupportedError
from caldera.models.attention import ATTENTION, PackedSequences
from caldera.models.forward import (
    base_module,
    hidden_states,
    language_head,
    language_logits,
    value_scores,
)
from caldera.models.loading import (
    build_sequence_classifier,
    build_value_model,
    enable_checkpointing,
    exported_weights,
    load_policy,
    save_pretrained,
)

KEY = "actor_rollout_ref.model"
TOKENS = torch.tensor([[3, 7, 1, 40, 12, 5]])
Folder = Callable[..., str]


def policy(path: str, dtype: torch.dtype = torch.float32, seed: int = 1, **keys: Any) -> nn.Module:
    return load_policy(ModelConfig(path=path, **keys), dtype, seed, KEY)


def value_model(path: str, seed: int = 1, **keys: Any) -> nn.Module:
    return build_value_model(
        ModelConfig(path=path, **keys), torch.float32, seed, "critic.model"
    ).module


def hidden(module: nn.Module) -> Tensor:
    packed = PackedSequences([TOKENS.shape[1]], torch.device("cpu"))
    return hidden_states(module, TOKENS, packed.position_ids, packed)


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return language_logits(module, hidden(module))


def with_random_adapter(module: nn.Module) -> nn.Module:
    """A fresh adapter changes nothing, because half of it is zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_policy_is_the_model_of_the_folder(model_folder: Folder, family: str) -> None:
    module = policy(model_folder(family))
    assert base_module(module) is module
    assert module.config._attn_implementation == ATTENTION
    expected = AutoModelForCausalLM.from_pretrained(model_folder(family))(TOKENS).logits[0]
    torch.testing.assert_close(logits(module), expected, rtol=1e-5, atol=1e-5)
    assert policy(model_folder(family), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("path", ["/no/such/folder", "nobody/nothing"])
def test_a_missing_model_names_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.path='{path}': "):
        policy(path)


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=rf"^{KEY}\.path='.*': no model could be loaded: "):
        policy(str(tmp_path))


def test_override_config(model_folder: Folder) -> None:
    module = policy(model_folder(), override_config={"rms_norm_eps": 0.5})
    assert not torch.allclose(logits(module), logits(policy(model_folder())))
    with pytest.raises(ConfigError, match=rf"^{KEY}\.override_config: .* has no depht$"):
        policy(model_folder(), override_config={"depht": 3})


def test_external_libraries_are_imported_first(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_library", "second_library"):
        (tmp_path / f"{name}.py").write_text("")
    policy(model_folder(), external_lib="first_library, second_library")
    assert {"first_library", "second_library"} <= set(sys.modules)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.external_lib: cannot import 'no_library'"):
        policy(model_folder(), external_lib="no_library")


def test_a_value_head_is_a_function_of_its_seed(model_folder: Folder) -> None:
    before = torch.get_rng_state()
    heads: list[Any] = [value_model(model_folder(), seed=seed).score for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    assert heads[0].weight.shape == (1, 32)
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert heads[0].weight.std() < 1


def test_a_scoring_head_is_fresh_unless_the_folder_has_one(
    model_folder: Folder, tmp_path: Path
) -> None:
    def head(path: str, seed: int) -> Tensor:
        config = ModelConfig(path=path)
        built: Any = build_sequence_classifier(config, torch.float32, seed, "model").module
        assert built.config.num_labels == 1
        return built.score.weight

    heads = [head(model_folder(), seed) for seed in (3, 3, 4)]
    assert heads[0].shape == (1, 32)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    trained: Any = build_sequence_classifier(
        ModelConfig(path=model_folder()), torch.float32, 5, "model"
    ).module
    save_pretrained(trained, tmp_path)
    assert torch.equal(head(str(tmp_path), 6), trained.score.weight)


def test_a_reward_models_adapter_comes_with_a_whole_head(model_folder: Folder) -> None:
    config = ModelConfig(path=model_folder(), lora_rank=2)
    module = build_sequence_classifier(config, torch.float32, 1, "model").module
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert [name for name in trained if ".lora_" not in name] == [
        "base_model.model.score.modules_to_save.default.weight"
    ]


def test_values_are_the_heads_scores(model_folder: Folder) -> None:
    module: Any = value_model(model_folder("qwen2"))
    states = hidden(module)
    expected = states @ module.score.weight[0] + module.score.bias
    torch.testing.assert_close(value_scores(module, states), expected)
    assert value_scores(module, states).shape == (6,)
    half = module.bfloat16()
    assert value_scores(half, states.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_only_the_adapter_trains(model_folder: Folder, family: str) -> None:
    plain, module = policy(model_folder(family)), policy(model_folder(family), lora_rank=2)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert all(".lora_" in name for name in trained)
    torch.testing.assert_close(logits(module), logits(plain))
    (hidden(module) ** 2).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in module.parameters())


def test_a_critics_adapter_comes_with_a_whole_head(model_folder: Folder) -> None:
    for exclude in (None, ["down_proj"], ".*down_proj"):
        module = value_model(model_folder(), lora_rank=2, exclude_modules=exclude)
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        others = [name for name in trained if ".lora_" not in name]
        assert [name.rpartition(".")[2] for name in others] == ["weight", "bias"]
        assert all(".score." in name for name in others)
        assert any("down_proj" in name for name in trained) == (exclude is None)


def test_an_adapter_is_a_function_of_its_seed(model_folder: Folder) -> None:
    def adapter(seed: int) -> Tensor:
        module = policy(model_folder(), seed=seed, lora_rank=2)
        return torch.cat([p.flatten() for p in module.parameters() if p.requires_grad])

    assert torch.equal(adapter(3), adapter(3))
    assert not torch.equal(adapter(3), adapter(4))


def test_target_modules(model_folder: Folder) -> None:
    module = policy(model_folder(), lora_rank=2, target_modules=["q_proj"])
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all("q_proj" in name for name in trained)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.target_modules=\['nothing'\]: "):
        policy(model_folder(), lora_rank=2, target_modules=["nothing"])


def test_an_adapter_of_the_head_is_refused(model_folder: Folder) -> None:
    module = policy(model_folder(), lora_rank=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(UnsupportedError, match="language head cannot have an adapter"):
        language_head(module)


def test_adapters_need_peft(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_peft(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.lora_rank=2 needs peft: .*pip install"):
        policy(model_folder(), lora_rank=2)


def test_a_plain_model_exports_its_own_tensors(model_folder: Folder) -> None:
    module: Any = policy(model_folder("qwen2"))
    exported = dict(exported_weights(module))
    assert exported.keys() == module.state_dict().keys()
    embedding = module.get_input_embeddings().weight
    assert exported["model.embed_tokens.weight"].data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_export_merges_the_adapter_as_peft_does(model_folder: Folder, family: str) -> None:
    module: Any = with_random_adapter(policy(model_folder(family), lora_rank=2, lora_alpha=3))
    before = logits(module)
    exported = dict(exported_weights(module))
    merged = copy.deepcopy(module).merge_and_unload().state_dict()
    assert exported.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    assert torch.equal(logits(module), before), "the export left the model as it was"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_saved_policy_loads_anywhere(
    model_folder: Folder, tmp_path: Path, family: str, rank: int
) -> None:
    module = with_random_adapter(policy(model_folder(family), lora_rank=rank))
    save_pretrained(module, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(TOKENS).logits[0], logits(module), rtol=1e-4, atol=1e-4)
    changed = not torch.allclose(logits(module), logits(policy(model_folder(family))), atol=0.1)
    assert changed == (rank > 0)
    assert ATTENTION not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_saved_value_model_loads_anywhere(
    model_folder: Folder, tmp_path: Path, rank: int
) -> None:
    module = with_random_adapter(value_model(model_folder(), lora_rank=rank))
    save_pretrained(module, tmp_path)
    again = AutoModelForTokenClassification.from_pretrained(tmp_path)
    values = value_scores(module, hidden(module))
    torch.testing.assert_close(again(TOKENS).logits[0, :, 0], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_checkpointing_changes_memory_alone(model_folder: Folder, rank: int) -> None:
    grads = []
    for checkpointing in (False, True):
        module = with_random_adapter(policy(model_folder(), lora_rank=rank)).train()
        if checkpointing:
            enable_checkpointing(module)
            assert base_module(module).is_gradient_checkpointing
        (hidden(module) ** 2).sum().backward()
        grads.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and grads[0]
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-6, atol=1e-6, msg=name)


def test_heads_that_are_not_plain_are_refused(
    tiny_model: Callable[..., PreTrainedModel], model_folder: Folder
) -> None:
    with_bias = tiny_model("llama")
    with_bias.lm_head = nn.Linear(32, 48)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no bias-free language head"):
        language_head(with_bias)
    with pytest.raises(UnsupportedError, match="TokenClassification has no bias-free"):
        language_head(value_model(model_folder()))
    capped = tiny_model("llama")
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM needs logit soft-capping"):
        language_head(capped)
