"""Write docs/reference/models.md: a tiny model of each architecture, sampled and compared.

python scripts/write_models_table.py           write the page
python scripts/write_models_table.py --check   fail if it is not up to date

Each is built with random weights, sampled natively (three prompts at a time, greedy), and run as in
training, on packed sequences. Log-probs are compared with those of transformers' own forward pass
of each sequence alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from caldera.config import RolloutConfig
from caldera.engine.packed_model import PackedModel
from caldera.errors import CalderaError
from caldera.models.attention import ATTENTION, PackedSequences
from caldera.models.forward import hidden_states, language_logits
from caldera.rollout import NativeRollout, Request, SamplingParams

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ALL_HEADS = {**SIZES, "num_key_value_heads": 4}
LATENT: dict[str, Any] = {
    **ALL_HEADS, **EXPERTS, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
DENSE = {
    "apertus": "Apertus", "arcee": "Arcee AFM", "bitnet": "BitNet", "ernie4_5": "ERNIE 4.5",
    "exaone4": "EXAONE 4", "gemma": "Gemma", "gemma3_text": "Gemma 3", "glm": "GLM-4",
    "glm4": "GLM-4-0414", "granite": "Granite", "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan", "llama": "Llama 2, 3; SmolLM2; many others",
    "ministral": "Ministral", "ministral3": "Ministral 3", "mistral": "Mistral",
    "olmo": "OLMo", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen", "qwen3": "Qwen3",
    "seed_oss": "Seed-OSS", "smollm3": "SmolLM3", "starcoder2": "StarCoder2",
    "bloom": "BLOOM", "cohere": "Command R", "cohere2": "Command R7B", "gemma2": "Gemma 2",
    "nemotron": "Nemotron", "phi": "Phi-1, Phi-2",
    "stablelm": "StableLM", "vaultgemma": "VaultGemma",
}  # fmt: skip
OF_EXPERTS = {
    "dots1": "dots.llm1", "ernie4_5_moe": "ERNIE 4.5 MoE", "glm4_moe": "GLM-4.5",
    "granitemoe": "Granite MoE", "hunyuan_v1_moe": "Hunyuan MoE", "minimax_m2": "MiniMax-M2",
    "mixtral": "Mixtral", "olmoe": "OLMoE", "phimoe": "Phi-3.5-MoE", "qwen2_moe": "Qwen1.5-MoE",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B", "gpt_oss": "gpt-oss",
    "llama4_text": "Llama 4", "qwen3_next": "Qwen3-Next", "jamba": "Jamba",
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT-2", GPT),
    "gpt_neox": ("Pythia, GPT-NeoX", ALL_HEADS),
    "opt": ("OPT", {**ALL_HEADS, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "deepseek_v3": ("DeepSeek-V3, R1", LATENT),
    "qwen3_5_text": ("Qwen3.5", SIZES),
    "kimi_linear": ("Kimi Linear", SIZES),
}
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (name, SIZES) for kind, name in DENSE.items()},
    **{kind: (name, {**SIZES, **EXPERTS}) for kind, name in OF_EXPERTS.items()},
    **OTHERS,
}
PROMPTS = [[5, 6, 7, 8, 9], [9] * 11, list(range(3, 21))]
NEW = 12
MOST_DIFFERENCE = 1e-3


def page() -> str:
    works, refused = [], []
    for kind, (name, values) in CHOICES.items():
        reason = tried(kind, values)
        row = f"| {name} | `{kind}` |"
        if reason:
            refused.append(f"{row} {reason} |")
        else:
            works.append(f"{row} {'yes' if kind in OF_EXPERTS else ''} |")
    return f"""# Models

<!-- Written by scripts/write_models_table.py. -->

Find out whether a model trains and is sampled natively: any decoder of transformers that attends
through its attention interface does. `caldera plan` builds the model without weights and reports a
refusal before a GPU is taken.

```bash
caldera plan actor_rollout_ref.model.path=outputs/demo-tiny/start algorithm.adv_estimator=grpo
```

## Work

A tiny model of each, with random weights, was sampled, and run on packed sequences as in training:
the log-probs equal those of transformers {transformers.__version__}. Exact mode and `caldera plan`
refuse models with experts.

| model | `model_type` | experts |
| -- | -- | -- |
{chr(10).join(works)}

Tested further:

| model | tests |
| -- | -- |
| Llama, Qwen2, Qwen3, Gemma 3 | every part of sampling and training on CPUs; sampling on an H200 |
| Mistral | the same on CPUs |
| SmolLM2-135M | whole runs with real weights on CPUs, also with vLLM and SGLang |
| Qwen2.5-0.5B and 1.5B | speed and memory on an H200, in their shapes |

With `rollout.name=vllm` or `sglang`, the sampler's own list of models counts beside this one.
[`strategy=megatron`](../engines.md) takes Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral.

## Refused

By the native sampler, by name, because packed or paged attention would compute something else
([decision 48](../adr/0048-models-whose-attention-bypasses-the-interface-are-refused.md)):

| model | `model_type` | reason |
| -- | -- | -- |
{chr(10).join(refused)}

Models with images, audio or several modalities are trained as text models where transformers has a
text model of their own (`gemma3_text`), and refused otherwise.
"""


def tried(kind: str, values: dict[str, Any]) -> str:
    """Why a model is refused; empty if it works."""
    torch.manual_seed(0)
    model, plain = (
        # Each has a config of its own, which holds the attention.
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values), attn_implementation=name)
        for name in (ATTENTION, "eager")
    )
    model.eval()
    plain.eval()
    plain.load_state_dict(model.state_dict())
    keys = RolloutConfig(prompt_length=64, response_length=64)
    params = SamplingParams(NEW, temperature=0, ignore_eos=True)
    try:
        completions = NativeRollout(keys, model, torch.device("cpu")).generate(
            [Request(prompt, params, seed) for seed, prompt in enumerate(PROMPTS)]
        )
    except CalderaError as error:
        return said(error, model)
    expected = [
        log_probs(plain, prompt, completion.token_ids)
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    compare(kind, expected, [torch.tensor(each.log_probs) for each in completions])
    compare(kind, [log_probs(plain, row[:4], row[4:]) for row in PROMPTS], packed(model))
    return ""


def said(error: CalderaError, model: PreTrainedModel) -> str:
    text = str(error).removesuffix(": not supported").removesuffix(", which is not supported")
    return text.replace("|", "\\|").replace(f"{type(model).__name__} ", "")


def compare(kind: str, expected: list[torch.Tensor], computed: list[torch.Tensor]) -> None:
    for one, other in zip(expected, computed, strict=True):
        difference = (one - other).abs().max().item()
        assert difference < MOST_DIFFERENCE, f"{kind} is computed wrongly: {difference}"


@torch.no_grad()
def packed(model: PreTrainedModel) -> list[torch.Tensor]:
    """The log-probs of each prompt's tokens from the fifth, computed as in training."""
    PackedModel(model)  # refuses models
    context = PackedSequences([len(prompt) for prompt in PROMPTS], torch.device("cpu"))
    tokens = torch.tensor([[token for prompt in PROMPTS for token in prompt]])
    hidden = hidden_states(model, tokens, context.position_ids, context)
    rows = language_logits(model, hidden).log_softmax(-1).split([len(p) for p in PROMPTS])
    return [
        row[3:-1].gather(-1, torch.tensor(prompt[4:])[:, None])[:, 0]
        for row, prompt in zip(rows, PROMPTS, strict=True)
    ]


@torch.no_grad()
def log_probs(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([prompt + response])).logits[0]
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(response)[:, None])[:, 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    is_check = parser.parse_args().check
    transformers.logging.set_verbosity_error()
    text = page()
    if not is_check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not up to date: run python scripts/write_models_table.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
