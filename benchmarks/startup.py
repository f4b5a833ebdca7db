"""Start-up: from the start of the process to the end of the first step of a local run.

    python benchmarks/startup.py [--repetitions 5] [--processes 1]

Each figure is the best of several fresh processes, which take turns. The peer, in the same run, is
a process that imports torch and transformers and does nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from caldera.demo.arithmetic import build_model, build_tokenizer, sums, write_parquet

LIMIT_S = 5.0
"""What a run may take until its first step is done, beyond those imports."""


def prepare(folder: Path) -> None:
    """A tiny model with random weights, and sums for it."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, seed=0).save_pretrained(folder / "model")
    training, held_out = sums(seed=0)
    write_parquet(training[:64], "train", folder / "train.parquet")
    write_parquet(held_out[:64], "test", folder / "test.parquet")


def import_only() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
    return time.perf_counter() - start


def first_step(folder: Path, processes: int) -> float:
    """Seconds until the metrics of the first step are written."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    command = [
        sys.executable,
        "-m",
        "caldera.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={folder}/model",
        f"{actor}.ppo_mini_batch_size=16",
        f"{actor}.ppo_micro_batch_size_per_gpu=64",
        f"{rollout}.n=4",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=64",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        f"trainer.n_gpus_per_node={processes}",
        "trainer.val_before_train=False",
        "trainer.logger=[file]",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={run}",
    ]
    metrics = run / "metrics.jsonl"
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(output.decode())
    return seconds


def best(measures: list[Callable[[], float]], repetitions: int) -> list[float]:
    """The least of each; in turns, so that a busy moment hits all of them."""
    rounds = [[measure() for measure in measures] for _ in range(repetitions)]
    return [min(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="ranks of the run")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        imports, step = best(
            [import_only, lambda: first_step(folder, arguments.processes)], arguments.repetitions
        )
    print(f"import torch and transformers      {imports:6.2f} s")
    print(f"from the start to the first step   {step:6.2f} s")
    print(f"difference                         {step - imports:6.2f} s (limit: {LIMIT_S:g} s)")


if __name__ == "__main__":
    main()
