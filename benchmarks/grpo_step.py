"""Whole GRPO steps: strategies beside each other, same model, same prompts, one run.

    python benchmarks/grpo_step.py [--device cuda|cpu] [--strategies fsdp2 megatron]
        [--shape 0.5B|tiny] [--steps 5]

Random weights in the shape of Qwen2.5-0.5B; 32 prompts of 58 tokens, 8 answers of 256 tokens each,
no KL. Each strategy runs in a process of its own. Prints the median of the steps after the first
two: seconds a step and of its parts, response tokens a second of the whole step and of the
sampling, and all tokens a second of the update; then ratios to the first strategy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from caldera.demo.arithmetic import build_tokenizer

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "tiny": (64, 128, 2, 4, 2, 512),
}
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 58, 256
SCORER = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
SCORER += "    return (len(solution_str) * 7919 % 101) / 101\n"


def write_inputs(folder: Path, shape: str) -> None:
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": f"{row:04d}" * ((PROMPT_TOKENS - 2) // 4)}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": row},
        }
        for row in range(16 * PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "score.py").write_text(SCORER)


def train(folder: Path, strategy: str, device: str, steps: int) -> None:
    """In a process of its own: the run itself."""
    from caldera.config import load_config
    from caldera.trainer.main_ppo import run_ppo

    is_megatron = strategy == "megatron"
    actor = "actor_rollout_ref.actor"
    own = (
        []
        if is_megatron
        else [f"{actor}.strategy={strategy}", f"{actor}.fsdp_config.dtype=bfloat16"]
    )
    config = load_config(
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={folder / 'prompts.parquet'}",
            f"data.val_files={folder / 'prompts.parquet'}",
            f"data.train_batch_size={PROMPTS}",
            f"data.max_prompt_length={PROMPT_TOKENS}",
            f"data.max_response_length={NEW_TOKENS}",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            f"{actor}.ppo_mini_batch_size={PROMPTS}",
            f"{actor}.use_dynamic_bsz=True",
            f"{actor}.ppo_max_token_len_per_gpu=32768",
            "actor_rollout_ref.rollout.ignore_eos=True",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"custom_reward_function.path={folder / 'score.py'}",
            f"trainer.device={device}",
            "trainer.logger=[file]",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder / strategy}",
            *own,
        ],
        "ppo_megatron_trainer" if is_megatron else "ppo_trainer",
    )
    run_ppo(config)


def figures(folder: Path) -> dict[str, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [data for line in lines if "timing_s/step" in (data := json.loads(line)["data"])][2:]
    median = {
        name: statistics.median(step[f"timing_s/{name}"] for step in steps)
        for name in ("step", "gen", "old_log_prob", "update_actor")
        if f"timing_s/{name}" in steps[0]
    }
    answers = PROMPTS * SAMPLES * NEW_TOKENS
    every = PROMPTS * SAMPLES * (NEW_TOKENS + PROMPT_TOKENS)
    return {
        **{f"{name} s": seconds for name, seconds in median.items()},
        "response tokens/s": answers / median["step"],
        "sampled tokens/s": answers / median["gen"],
        "updated tokens/s": every / median["update_actor"],
        "GiB": max(step.get("perf/max_memory_allocated_gb", 0.0) for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--strategies", nargs="+", default=["fsdp2", "megatron"])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        train(Path(arguments.inside), arguments.strategies[0], arguments.device, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, arguments.shape)
        found = {}
        for strategy in arguments.strategies:
            command = [sys.executable, __file__, "--inside", name, "--strategies", strategy]
            command += ["--device", arguments.device, "--steps", str(arguments.steps)]
            subprocess.run(command, check=True)
            found[strategy] = figures(folder / strategy)
    first = found[arguments.strategies[0]]
    for strategy, values in found.items():
        told = "   ".join(
            f"{key} {value:,.3g}" if value < 100 else f"{key} {value:,.0f}"
            for key, value in values.items()
        )
        sys.stdout.write(f"{strategy:10s} {told}\n")
        ratio = values["response tokens/s"] / first["response tokens/s"]
        update = values["updated tokens/s"] / first["updated tokens/s"]
        sys.stdout.write(f"{'':10s} ratio of the step {ratio:.2f}, of the update {update:.2f}\n")


if __name__ == "__main__":
    main()
