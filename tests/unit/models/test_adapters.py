"""Adapters that start from a folder, and adapters that are merged."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from caldera.config import ModelConfig
from caldera.errors import ConfigError
from caldera.models.forward import base_module
from caldera.models.loading import (
    build_policy,
    build_value_model,
    exported_weights,
    load_policy,
    save_pretrained,
)

KEY = "actor_rollout_ref.model"
Folder = Callable[..., str]


def policy(path: str, dtype: torch.dtype = torch.float32, **keys: Any) -> nn.Module:
    return load_policy(ModelConfig(path=path, **keys), dtype, 1, KEY)


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def randomised(module: nn.Module) -> nn.Module:
    """As after training: no part of the adapter is zero."""
    generator = torch.Generator().manual_seed(5)
    for value in trained(module).values():
        value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return module


@pytest.fixture
def saved(model_folder: Folder, tmp_path: Path) -> tuple[nn.Module, Path]:
    """A policy with an adapter, and the folder that the adapter was saved to."""
    keys: dict[str, Any] = {
        "lora_rank": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "up_proj"],
    }
    module: Any = randomised(policy(model_folder(), **keys))
    module.save_pretrained(tmp_path / "adapter")
    return module, tmp_path / "adapter"


def test_a_saved_adapter_goes_on(model_folder: Folder, saved: tuple[nn.Module, Path]) -> None:
    first, folder = saved
    again = policy(model_folder(), lora_adapter_path=str(folder))
    assert trained(again).keys() == trained(first).keys()
    for name, value in trained(first).items():
        assert torch.equal(trained(again)[name], value), name
    layer = base_module(again).model.layers[0].self_attn.q_proj
    assert layer.scaling == {"default": 5 / 3}
    assert dict(exported_weights(again)).keys() == dict(exported_weights(first)).keys()
    for (name, one), (_, other) in zip(
        exported_weights(first), exported_weights(again), strict=True
    ):
        assert torch.equal(one, other), name


def test_a_saved_adapter_of_an_empty_model(
    model_folder: Folder, saved: tuple[nn.Module, Path]
) -> None:
    first, folder = saved
    config = ModelConfig(path=model_folder(), lora_adapter_path=str(folder))
    built = build_policy(config, torch.bfloat16, 1, KEY, empty=True)
    assert all(p.is_meta for p in built.module.parameters())
    whole = load_policy(config, torch.bfloat16, 1, KEY)
    assert built.source.names() == [name for name, _ in whole.named_parameters()]
    for name, parameter in whole.named_parameters():
        assert torch.equal(built.source.tensor(name), parameter), name
    for name, value in trained(first).items():
        assert torch.equal(built.source.tensor(name), value), name


@pytest.mark.parametrize("empty", [False, True])
def test_a_saved_critic_brings_its_head(model_folder: Folder, tmp_path: Path, empty: bool) -> None:
    config = ModelConfig(path=model_folder(), lora_rank=2)
    first: Any = randomised(build_value_model(config, torch.float32, 1, "critic.model").module)
    first.save_pretrained(tmp_path)
    config = ModelConfig(path=model_folder(), lora_adapter_path=str(tmp_path))
    built = build_value_model(config, torch.float32, 2, "critic.model", empty)
    names = list(trained(first))
    assert sum(".score." in name for name in names) == 2
    for name in names:
        value = built.source.tensor(name) if empty else built.module.get_parameter(name)
        assert torch.equal(value, trained(first)[name]), name


def test_the_folders_rank_holds(
    model_folder: Folder, saved: tuple[nn.Module, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, folder = saved
    with caplog.at_level(logging.WARNING):
        policy(model_folder(), lora_adapter_path=str(folder), lora_rank=3)
        assert not caplog.text
        module = policy(model_folder(), lora_adapter_path=str(folder), lora_rank=8)
    assert f"{KEY}.lora_adapter_path='{folder}': its rank is 3, not 8" in caplog.text
    assert base_module(module).model.layers[0].self_attn.q_proj.r == {"default": 3}


def refusal(model: str, folder: Path, empty: bool = True) -> str:
    """What is said about a folder, which is always one line that begins with the key."""
    config = ModelConfig(path=model, lora_adapter_path=str(folder))
    with pytest.raises(ConfigError) as raised:
        build_policy(config, torch.float32, 1, KEY, empty)
    message = str(raised.value)
    start = f"{KEY}.lora_adapter_path='{folder}'"
    assert message.startswith(start) and "\n" not in message
    return message.removeprefix(start)


@pytest.mark.parametrize("empty", [False, True])
def test_an_adapter_of_another_model(
    model_folder: Folder, saved: tuple[nn.Module, Path], empty: bool
) -> None:
    _, folder = saved
    model = model_folder("starcoder2")  # which has no up_proj
    assert " does not fit the model, which has no " in refusal(model, folder, empty)
    told = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**told, "target_modules": ["nothing"]}))
    assert "nothing" in refusal(model_folder(), folder, empty)
    (folder / "adapter_config.json").write_text(json.dumps({**told, "r": 4}))
    assert "lora_A.weight is (3, 32), not (4, 32)" in refusal(model_folder(), folder, empty)


def test_files_of_an_adapter_that_are_damaged(
    model_folder: Folder, saved: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    _, folder = saved
    model, weights = model_folder(), folder / "adapter_model.safetensors"
    assert "adapter_config.json cannot be read" in refusal(model, tmp_path / "nowhere")
    state = load_file(weights)
    gone = min(state)
    del state[gone]
    save_file(state, weights)
    assert refusal(model, folder) == f" does not fit the model: its file lacks {gone}"
    weights.unlink()
    assert "adapter_model.safetensors cannot be read" in refusal(model, folder)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"peft_type": "IA3"}, "takes a LoRA adapter, not 'IA3'"),
        ({"task_type": "TOKEN_CLS"}, "it was made for TOKEN_CLS, this model is CAUSAL_LM"),
        ({"lora_bias": True}, "takes a plain adapter, this one has lora_bias=True"),
        ({"init_lora_weights": "pissa"}, "this one has init_lora_weights='pissa'"),
        ({"use_dora": True}, "takes a plain adapter, not a variant such as DoRA"),
        ({"layers_pattern": "x"}, "peft cannot use adapter_config.json: "),
    ],
)
def test_adapters_of_other_kinds(
    model_folder: Folder, saved: tuple[nn.Module, Path], changed: dict[str, Any], said: str
) -> None:
    _, folder = saved
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    assert said in refusal(model_folder(), folder)


def merged_by_peft(module: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = copy.deepcopy(module).merge_and_unload().state_dict()
    return state


def assert_merged_as_by_peft(module: nn.Module, tolerance: float = 1e-6) -> None:
    exported, expected = dict(exported_weights(module)), merged_by_peft(module)
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        torch.testing.assert_close(exported[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_an_adapter_of_embeddings_and_transposed_layers() -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=20, n_positions=8, n_embd=12, n_layer=2, n_head=2
    )
    config.tie_word_embeddings = False
    lora = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        alpha_pattern={"c_fc": 7},
        fan_in_fan_out=True,
        target_modules=["c_attn", "c_fc", "wte"],
    )
    module = randomised(peft.get_peft_model(AutoModelForCausalLM.from_config(config), lora))
    assert (
        len({str(layer.scaling) for layer in module.modules() if isinstance(layer, LoraLayer)}) == 2
    )
    assert_merged_as_by_peft(module)


def test_merging_in_bfloat16(model_folder: Folder) -> None:
    module = randomised(policy(model_folder("qwen2"), torch.bfloat16, lora_rank=2))
    assert {value.dtype for value in trained(module).values()} == {torch.float32}
    assert_merged_as_by_peft(module, 1e-2)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_parts_are_made_whole_one_at_a_time(model_folder: Folder, lora_rank: int) -> None:
    module = policy(model_folder("qwen2"), lora_rank=lora_rank)
    if lora_rank:
        randomised(module)
    expected = {name: tensor.clone() for name, tensor in exported_weights(module)}
    whole = module.state_dict()
    parts = {name: tensor.chunk(2)[0] for name, tensor in whole.items()}
    names = {id(part): name for name, part in parts.items()}
    asked: list[str] = []

    def made_whole(part: Tensor) -> Tensor:
        asked.append(names[id(part)])
        return whole[asked[-1]]

    stream = exported_weights(module, made_whole, parts)
    assert not asked
    name, tensor = next(stream)
    assert len(asked) == 1 and torch.equal(tensor, expected[name])
    for name, tensor in stream:
        assert torch.equal(tensor, expected[name]), name
    assert sorted(asked) == sorted(whole), "each once, in the order of the state"
    first = next(i for i, name in enumerate(asked) if "q_proj" in name)
    if lora_rank:
        ends = [name.partition("q_proj.")[2] for name in asked[first : first + 3]]
        assert ends == ["base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"]


def test_layers_inside_other_wrappers_are_merged(model_folder: Folder) -> None:
    module = randomised(policy(model_folder(), lora_rank=2))
    expected = {name: tensor.clone() for name, tensor in exported_weights(module)}
    layers = base_module(module).model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    for name, tensor in exported_weights(module):
        assert torch.equal(tensor, expected[name]), name


def test_a_stream_is_saved_with_tied_weights_once(
    model_folder: Folder, tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    module: Any = policy(model_folder("qwen2"))
    stream = ((name, tensor.clone() * 2) for name, tensor in exported_weights(module))
    save_pretrained(module, tmp_path, stream)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    embedding = module.get_input_embeddings().weight
    assert torch.equal(state["model.embed_tokens.weight"], 2 * embedding)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
