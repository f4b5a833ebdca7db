"""`caldera merge`: what comes out of checkpoints of every kind, and what is refused."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from caldera.cli import main
from caldera.commands import merging
from caldera.config import ModelConfig
from caldera.engine.checkpoints import save_distributed
from caldera.engine.checkpoints.classic import save_classic
from caldera.models.forward import base_module
from caldera.models.loading import build_reward_model
from caldera.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from tests.integration.layout_workers import Layouts, Root

SIZES: dict[str, Any] = {
    "vocab_size": 49,
    "hidden_size": 32,
    "intermediate_size": 62,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
TOKENS = torch.arange(20).reshape(2, 10)


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """The entry point sets logging up for its process, which here is the tests'."""
    root, own = logging.getLogger(), logging.getLogger("caldera")
    handlers, levels = list(root.handlers), (root.level, own.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def build(
    kind: str = "llama", critic: bool = False, lora: bool = False, judge: bool = False, **sizes: Any
) -> Any:
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    factory: Any = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    if judge:
        factory = AutoModelForSequenceClassification
    if critic or judge:
        config.num_labels = 1
    torch.manual_seed(3)
    model = factory.from_config(config).eval()
    model.config.architectures = ["LlamaForCausalLM"]  # as in the folder that a run starts from
    if not lora:
        return model
    model.name_or_path = "models/base"
    task = "TOKEN_CLS" if critic else "SEQ_CLS" if judge else "CAUSAL_LM"
    adapter = peft.LoraConfig(
        task_type=task, r=3, target_modules="all-linear", init_lora_weights=False,
        exclude_modules=["score"] if critic or judge else None,
    )  # fmt: skip
    return peft.get_peft_model(model, adapter).eval()


def lower_precision(module: nn.Module, dtype: torch.dtype) -> None:
    """Of the model; adapters stay precise, as peft has it."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if ".lora_" in name else dtype)


def describe(module: Any, folder: Path) -> None:
    """What a run writes beside the weights."""
    descriptions = folder / "huggingface"
    base_module(module).config.save_pretrained(descriptions)
    (descriptions / "tokenizer.json").write_text("{}")
    if isinstance(module, peft.PeftModel):
        module.save_pretrained(str(folder / "lora_adapter"), save_embedding_layers=False)


def checkpoint(module: Any, folder: Path, style: str = "dist") -> Path:
    save: Any = save_classic if style == "classic" else save_distributed
    save(Root(module), None, folder, ["model"])
    describe(module, folder)
    return folder


def run(*arguments: object) -> int:
    return main(["merge", *(str(one) for one in arguments)])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("style", ["dist", "classic"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model(tmp_path: Path, capsys: Any, style: str, tied: bool) -> None:
    model = build(tie_word_embeddings=tied)
    source = checkpoint(model, tmp_path / "global_step_2" / "actor", style)
    (tmp_path / "global_step_2" / "critic").mkdir()
    (source / "huggingface" / "model.safetensors").write_text("of an earlier merge")
    out = tmp_path / "model=1"
    assert run("--local-dir", tmp_path / "global_step_2", "--target-dir", out) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert f"{source} ({style} layout, 21 tensors" in shown
    assert f"Writing: tensor {20 if tied else 21}/{20 if tied else 21} | elapsed" in shown
    assert "logits of 2 x 32 probe tokens in float32, model of the folder against" in shown
    assert "largest difference 0" in shown
    loaded: Any = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor)
    assert ("lm_head.weight" in names_in(out)) is not tied
    assert (out / "tokenizer.json").read_text() == "{}"
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "model=1"]


def test_verls_spelling_and_another_precision(tmp_path: Path, capsys: Any) -> None:
    model = build()
    source = checkpoint(model, tmp_path / "actor", "classic")
    out = tmp_path / "out"
    common = ["--backend", "fsdp", "--local_dir", source, "--use_cpu_initialization"]
    assert run("merge", *common, "--target_dir", out, "--dtype", "bfloat16") == 0
    assert "probe tokens in bfloat16" in capsys.readouterr().out
    loaded: Any = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert run("test", *common, "--test_hf_dir", out) == 0
    assert "21 tensors of the checkpoint against" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_tell_its_model(tmp_path: Path, capsys: Any) -> None:
    source, out = checkpoint(build(), tmp_path / "actor"), tmp_path / "out"
    elsewhere = (source / "huggingface").rename(tmp_path / "base")
    assert run("--local_dir", source, "--target_dir", out) == 2
    assert "--hf-model-path names a folder that does" in capsys.readouterr().err
    assert run("--local_dir", source, "--target_dir", out, "--hf_model_path", elsewhere) == 0
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
    assert (out / "tokenizer.json").is_file()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs a POSIX system")
def test_shards_of_two_ranks(tmp_path: Path) -> None:
    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Layouts), "shards")
    try:
        group.build("fsdp2-1x2x1", seed=4)
        group.train(1)
        expected = group.whole()[0]
        for style in ("dist", "classic"):
            group.save(tmp_path / style, style)
    finally:
        group.shutdown()
    for style in ("dist", "classic"):
        describe(build(tie_word_embeddings=True), tmp_path / style)
        assert run("--local-dir", tmp_path / style, "--target-dir", tmp_path / f"of_{style}") == 0
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / f"of_{style}")
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[name])


def test_a_critic(tmp_path: Path) -> None:
    model = build(critic=True)
    model.score.float()
    source = checkpoint(model, tmp_path / "critic")
    for number, flags in enumerate(([], ["--is-value-model"])):
        out = tmp_path / str(number)
        assert run("--local-dir", source, "--target-dir", out, *flags) == 0
        loaded: Any = AutoModelForTokenClassification.from_pretrained(out)
        assert torch.equal(logits(loaded), logits(model))
        config = json.loads((out / "config.json").read_text())
        assert config["architectures"] == ["LlamaForTokenClassification"]


@pytest.mark.parametrize(
    ("lora", "dtype", "near"),
    [
        (False, torch.float32, 0.0),
        (True, torch.float32, 1e-4),
        (False, torch.bfloat16, 0.0),
        (True, torch.bfloat16, 0.3),
    ],
)
def test_a_reward_model(tmp_path: Path, lora: bool, dtype: torch.dtype, near: float) -> None:
    """It is loaded as one, by transformers and for PPO."""
    module = build(judge=True, lora=lora, pad_token_id=0)
    lower_precision(module, dtype)
    base_module(module).score.float()  # as it is trained
    source = checkpoint(module, tmp_path / "actor")
    out = tmp_path / "out"
    assert run("--local-dir", source, "--target-dir", out, "--adapter", "merge") == 0
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    assert logits(loaded).shape == (len(TOKENS), 1)
    torch.testing.assert_close(logits(loaded), logits(module.float()), rtol=0, atol=near)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    built: Any = build_reward_model(ModelConfig(path=str(out)), torch.float32, "reward_model.model")
    assert torch.equal(built.module.score.weight, loaded.score.weight)


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_stays_one(
    tmp_path: Path, capsys: Any, critic: bool, dtype: torch.dtype
) -> None:
    module = build(critic=critic, lora=True)
    lower_precision(module, dtype)
    source = checkpoint(module, tmp_path / "actor")
    out = tmp_path / "adapter"
    assert run("--local-dir", source, "--target-dir", out) == 0
    shown = capsys.readouterr().out
    assert "largest difference 0" in shown
    assert f"Adapter: {out}, of models/base" in shown.replace("\n", " ")
    assert not (out / "model.safetensors").exists()
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "models/base"
    base = build(critic=critic)
    lower_precision(base, dtype)
    loaded = peft.PeftModel.from_pretrained(base, out)
    assert torch.equal(logits(loaded), logits(module))
    assert run("test", "--local-dir", source, "--test-hf-dir", out) == 0
    assert run("test", "--local-dir", source, "--test-hf-dir", source / "lora_adapter") == 0


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged(
    tmp_path: Path, capsys: Any, critic: bool, dtype: torch.dtype
) -> None:
    module = build(critic=critic, lora=True, tie_word_embeddings=not critic)
    lower_precision(module, dtype)
    source = checkpoint(module, tmp_path / "actor")
    out = tmp_path / "model"
    assert run("--local-dir", source, "--target-dir", out, "--adapter", "merge") == 0
    shown = capsys.readouterr().out
    assert "largest difference from the adapter apart" in shown
    assert "Writing: tensor 22/22" in shown if critic else "Writing: tensor 20/20" in shown
    factory = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    loaded: Any = factory.from_pretrained(out)
    assert loaded.dtype == dtype
    assert not any("lora" in name for name in names_in(out))
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    assert torch.allclose(logits(loaded), logits(module), rtol=0, atol=tolerance)
    with module.disable_adapter():
        assert not torch.allclose(logits(loaded), logits(module), rtol=0, atol=tolerance)
    assert run("test", "--local-dir", source, "--test-hf-dir", out) == 0


def test_a_model_whose_files_have_other_names(tmp_path: Path) -> None:
    """Experts are one tensor in the model, and many in its files."""
    model = build(
        "qwen2_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    source = checkpoint(model, tmp_path / "actor")
    out = tmp_path / "model"
    assert run("--local-dir", source, "--target-dir", out) == 0
    assert any(".experts.2." in name for name in names_in(out))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))
    assert run("test", "--local-dir", source, "--test-hf-dir", out) == 0


def test_large_models_are_several_files(tmp_path: Path, monkeypatch: Any) -> None:
    model = build()
    source = checkpoint(model, tmp_path / "actor")
    monkeypatch.setattr(merging.write_weights, "__defaults__", (20_000,))
    out = tmp_path / "model"
    assert run("--local-dir", source, "--target-dir", out) == 0
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files[0] == "model-00001-of-00005.safetensors"
    assert len(files) == 5
    assert max(path.stat().st_size for path in out.glob("*.safetensors")) < 22_000
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


@pytest.mark.parametrize("lora", [False, True])
def test_a_folder_that_is_not_right_is_not_left_behind(
    tmp_path: Path, monkeypatch: Any, capsys: Any, lora: bool
) -> None:
    source = checkpoint(build(lora=lora), tmp_path / "actor")
    cast = merging._cast

    def spoiled(weights: Any, dtype: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in cast(weights, dtype):
            yield name, tensor * 1.01 if "layers.1.mlp.up_proj" in name else tensor

    monkeypatch.setattr(merging, "_cast", spoiled)
    assert run("--local-dir", source, "--target-dir", tmp_path / "model") == 2
    told = capsys.readouterr().err
    assert "is not what the checkpoint holds: logits of 2 x 32 probe tokens" in told
    assert "largest difference 0." in told or "largest difference 1." in told
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]


def test_other_folders_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    model = build()
    source = checkpoint(model, tmp_path / "actor")
    with torch.no_grad():
        model.model.norm.weight[3] += 0.25
    model.save_pretrained(tmp_path / "other")
    assert run("test", "--local-dir", source, "--test-hf-dir", tmp_path / "other") == 2
    told = capsys.readouterr().err
    assert "1 of 21 tensors differ, model.norm.weight first; the largest difference is 0.25" in told
    build(num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    assert run("test", "--local-dir", source, "--test-hf-dir", tmp_path / "deeper") == 2
    assert "deeper holds model.layers.2." in capsys.readouterr().err
    build(vocab_size=50).save_pretrained(tmp_path / "wider")
    assert run("test", "--local-dir", source, "--test-hf-dir", tmp_path / "wider") == 2
    assert (
        "model.embed_tokens.weight is (50, 32), in the checkpoint (49, 32)"
        in capsys.readouterr().err
    )


def test_tied_on_request(tmp_path: Path, capsys: Any) -> None:
    model: PreTrainedModel = build()
    source = checkpoint(model, tmp_path / "different")
    tie = ("--tie-word-embedding", "--target-dir", tmp_path / "model")
    assert run("--local-dir", source, *tie) == 2
    assert "lm_head.weight and model.embed_tokens.weight differ" in capsys.readouterr().err
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    source = checkpoint(model, tmp_path / "equal")
    assert run("--local-dir", source, *tie) == 0
    assert "lm_head.weight" not in names_in(tmp_path / "model")


def test_what_is_refused(tmp_path: Path, capsys: Any) -> None:
    source = checkpoint(build(lora=True), tmp_path / "actor")
    out = tmp_path / "out"

    def told(*arguments: object) -> str:
        assert run(*arguments) == 2
        found: str = capsys.readouterr().err
        assert not out.exists()
        return found

    common = ("--local-dir", source, "--target-dir", out)
    assert "--backend=fsdp3: takes fsdp, megatron" in told(*common, "--backend", "fsdp3")
    assert "--hf-upload-path=me/it: nothing is uploaded" in told(*common, "--hf_upload_path=me/it")
    assert "needs --target-dir" in told("--local-dir", source)
    assert "needs --test-hf-dir" in told("test", "--local-dir", source)
    assert "there is no such folder" in told("--local-dir", tmp_path / "no", "--target-dir", out)
    assert "holds no checkpoint" in told("--local-dir", source / "huggingface", "--target-dir", out)
    assert "exists already and is not empty" in told("--local-dir", source, "--target-dir", source)
    settings = source / "lora_adapter" / "adapter_config.json"
    kept = settings.read_text()
    settings.unlink()
    assert "adapter_config.json is missing" in told(*common)
    settings.write_text(kept)
    config = source / "huggingface" / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    assert f"is no LlamaForCausalLM, as {config} has it" in told(*common)
    config.unlink()
    assert "does not tell what model this is" in told(*common)
