"""The module as the sampler runs it on CUDA: what of it can be seen on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from caldera.models.attention import ATTENTION, PackedSequences
from caldera.models.forward import hidden_states
from caldera.rollout.native.backbone import compiled_backbone, plain_backbone
from caldera.rollout.native.cuda.graphs import capture_sizes, step_inputs
from caldera.rollout.native.cuda.runner import FusedModule
from caldera.rollout.native.sampler import SamplingRows, draws

CPU = torch.device("cpu")


@pytest.fixture
def module() -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


@torch.no_grad()
def hidden(module: nn.Module, lengths: list[int]) -> torch.Tensor:
    ids = torch.arange(sum(lengths))[None] % 100
    packed = PackedSequences(lengths, CPU)
    return hidden_states(module, ids, packed.position_ids, packed)


def test_a_twin_computes_the_same_from_the_same_memory(module: PreTrainedModel) -> None:
    want = hidden(module, [8, 12])
    state = {name: value.clone() for name, value in module.state_dict().items()}
    fused = FusedModule(module, torch.float32)
    torch.testing.assert_close(hidden(fused.module, [8, 12]), want)
    assert torch.equal(hidden(module, [8, 12]), want)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert {p.untyped_storage().data_ptr() for p in fused.module.parameters()} <= own


def test_an_optimiser_that_changes_the_module_changes_the_twin(module: PreTrainedModel) -> None:
    fused = FusedModule(module, torch.float32)
    before = hidden(fused.module, [5, 7])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    packed = PackedSequences([12], CPU)
    ids = torch.arange(12)[None]
    hidden_states(module, ids, packed.position_ids, packed).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(hidden(fused.module, [5, 7]), hidden(module, [5, 7]))
    assert not torch.allclose(before, hidden(fused.module, [5, 7]))
    assert not fused.has_moved


def test_a_module_with_a_twin_is_saved_as_any(module: PreTrainedModel, tmp_path: Path) -> None:
    FusedModule(module, torch.float32)
    module.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in module.state_dict().items())


def test_another_precision_has_weights_of_its_own(module: PreTrainedModel) -> None:
    fused = FusedModule(module, torch.bfloat16)
    assert {p.dtype for p in fused.module.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    stale = hidden(fused.module, [9])
    fused.refresh()
    fresh = hidden(fused.module, [9])
    rounded = hidden(module.bfloat16(), [9])
    torch.testing.assert_close(fresh, rounded, rtol=0.02, atol=0.02)
    assert not torch.allclose(stale, rounded, rtol=0.02, atol=0.02)


def test_weights_that_move_are_noticed(module: PreTrainedModel) -> None:
    fused = FusedModule(module, torch.float32)
    weight = module.model.layers[1].self_attn.k_proj.weight
    weight.data = weight.data.clone()
    assert fused.has_moved
    assert not FusedModule(module, torch.float32).has_moved


def test_a_layer_of_its_own_forward_is_not_the_modules(module: PreTrainedModel) -> None:
    calls: list[int] = []
    layer = module.model.layers[0]
    forward = layer.forward

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    layer.forward = own
    fused = FusedModule(module, torch.float32)
    hidden(fused.module, [4])
    assert not calls


def test_all_layers_share_one_compilation(
    module: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[torch.fx.GraphModule] = []
    compile_for_real = torch.compile

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda code, **keys: compile_for_real(code, backend=keep, **keys)
    )
    want = [hidden(module, [8, 12]), hidden(module, [5, 4])]
    fused = FusedModule(module, torch.float32)
    backbone = compiled_backbone(fused.module)
    with torch.no_grad():
        for lengths, wanted in zip(([8, 12], [5, 4]), want, strict=True):
            packed = PackedSequences(lengths, CPU)
            tokens = torch.arange(sum(lengths))[None] % 100
            got = backbone(tokens, packed.position_ids, packed)
            torch.testing.assert_close(got, wanted)
    attends = [sum("attend" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert sum(attends) == 1
    layer = graphs[attends.index(1)]
    products = [node for node in layer.graph.nodes if node.target is torch._C._nn.linear]
    assert len(products) == 4  # query, key and value; output; gate and up; down


def test_the_plain_trunk_runs_what_attends(module: PreTrainedModel) -> None:
    packed = PackedSequences([6], CPU)
    with torch.no_grad():
        got = plain_backbone(module)(torch.arange(6)[None], packed.position_ids, packed)
    torch.testing.assert_close(got, hidden(module, [6]))


@pytest.mark.parametrize("largest", [1, 8, 100, 256, 1000, 4096])
def test_the_ladder_reaches_up_to_the_largest(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    wasted = [(above - below - 1) / above for below, above in zip([0, *sizes], sizes, strict=False)]
    assert all(share < 0.5 for size, share in zip(sizes, wasted, strict=True) if size > 16)


def test_what_a_step_is_told() -> None:
    import numpy as np

    sampling = SamplingRows(
        temperature=np.array([0.5, 0.0]), top_k=np.zeros(2, int), top_p=np.ones(2),
        min_p=np.zeros(2), seed=np.array([1, 2], np.uint64), generated=np.array([0, 3]),
    )  # fmt: skip
    rows, positions = np.array([3, 1]), np.array([20, 5])
    told = step_inputs(rows, positions, np.array([16 * 7 + 4, 16 * 2 + 5]), sampling)
    assert told[:3].tolist() == [[3, 1], [20, 5], [7, 2]]
    words = draws(sampling.seed, sampling.generated)
    assert told[3].view(np.uint32).tolist() == words.tolist()
    assert told[4].view(np.float32).tolist() == [2.0, 0.0]
    assert not step_inputs(rows, positions, rows, None)[3:].any()
