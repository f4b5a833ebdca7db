"""Learning curves of the algorithms, for the pages of docs/algorithms.

    python scripts/algorithm_curves.py run --jobs 8    # train, and collect into curves.json
    python scripts/algorithm_curves.py draw            # one picture a page, from curves.json

Every curve is the demo of the tiny transformer with a few other keys, all from the same supervised
start. A run is one process with one thread, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from caldera.config import load_config
from caldera.demo.arithmetic import DATA_SOURCE
from caldera.demo.run import COMMON, TINY, prepare_tiny
from caldera.storage.writing import write_text_atomic
from caldera.tracking import Series, svg_curve
from caldera.tracking.report import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURES = REPOSITORY / "docs/assets/curves"
ACCURACY = f"val-core/{DATA_SOURCE}/acc/mean@1"
REWARD = "critic/score/mean"
DIGITS = 4
LOG_LINES = 15  # of a run that failed

# ---------------------------------------------------------------------- what is run

ALGORITHM = "algorithm"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"

SETTINGS = (
    "critic.optim.lr_warmup_steps=10",
    "critic.optim.lr_scheduler_type=cosine",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.save_freq=-1",
    "trainer.test_freq=10",
)
"""What all curves have in common, beyond the demo's own."""


def estimator(name: str, *more: str) -> tuple[str, ...]:
    return (f"{ALGORITHM}.adv_estimator={name}", *more)


def loss(name: str, *more: str) -> tuple[str, ...]:
    return (f"{ACTOR}.policy_loss.loss_mode={name}", *more)


def aggregation(mode: str) -> tuple[str, ...]:
    return (f"{ACTOR}.loss_agg_mode={mode}",)


def kl_loss(kind: str) -> tuple[str, ...]:
    return (
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_type={kind}",
        f"{ACTOR}.kl_loss_coef=0.01",
    )


def correction(preset: str) -> tuple[str, ...]:
    """The sampler computes in another precision, so that there is something to correct."""
    return (f"{ROLLOUT}.dtype=bfloat16", f"{ALGORITHM}.rollout_correction.preset={preset}")


SQUARES = f"{ACTOR}.calculate_sum_pi_squared=True"

CURVES: dict[str, tuple[str, ...]] = {
    "gae": estimator("gae"),
    "pf_ppo": estimator("gae", f"{ALGORITHM}.use_pf_ppo=True"),
    "grpo": (),
    "dr_grpo": (
        f"{ALGORITHM}.norm_adv_by_std_in_grpo=False",
        *aggregation("seq-mean-token-sum-norm"),
    ),
    "grpo_passk": estimator("grpo_passk"),
    "maxrl": estimator("maxrl"),
    "gdpo": estimator("gdpo", f"{ALGORITHM}.gdpo_reward_keys=[acc]"),
    "rloo": estimator("rloo"),
    "opo": estimator("opo"),
    "gpg": estimator("gpg"),
    "reinforce_plus_plus_baseline": estimator("reinforce_plus_plus_baseline"),
    "reinforce_plus_plus": estimator("reinforce_plus_plus"),
    "remax": estimator("remax"),
    "optimal_token_baseline": estimator("optimal_token_baseline", SQUARES),
    "tir_optimal_token_baseline": estimator("tir_optimal_token_baseline", SQUARES),
    "loss_gspo": loss("gspo"),
    "loss_sapo": loss("sapo"),
    "loss_geo_mean": loss("geo_mean"),
    "loss_cispo": loss("cispo"),
    "loss_gpg": loss("gpg"),
    "loss_clip_cov": loss("clip_cov"),
    "loss_kl_cov": loss("kl_cov"),
    "loss_dppo_tv": loss("dppo_tv"),
    "loss_dppo_kl": loss("dppo_kl"),
    "loss_dro": loss("dro", f"{ACTOR}.policy_loss.dro_beta=0.1"),
    "token-sum": aggregation("token-sum"),
    "seq-mean-token-sum": aggregation("seq-mean-token-sum"),
    "seq-mean-token-sum-norm": aggregation("seq-mean-token-sum-norm"),
    "seq-mean-token-mean": aggregation("seq-mean-token-mean"),
    "kl_k1_in_reward": (
        f"{ALGORITHM}.use_kl_in_reward=True",
        f"{ALGORITHM}.kl_penalty=k1",
        f"{ALGORITHM}.kl_ctrl.kl_coef=0.01",
    ),
    "kl_k3_loss": kl_loss("k3"),
    "kl_full_loss": kl_loss("full"),
    "bf16_disabled": correction("disabled"),
    "bf16_decoupled_token_is": correction("decoupled_token_is"),
    "bf16_decoupled_k3_rs": correction("decoupled_k3_rs"),
    "bf16_bypass_ppo_clip": correction("bypass_ppo_clip"),
    "bf16_bypass_pg_is": correction("bypass_pg_is"),
    "dapo": (
        f"{ACTOR}.clip_ratio_low=0.2",
        f"{ACTOR}.clip_ratio_high=0.28",
        *aggregation("token-mean"),
        f"{ALGORITHM}.filter_groups.enable=True",
        f"{ALGORITHM}.filter_groups.metric=acc",
        "data.gen_batch_size=64",
        # Right answers take up to 4 tokens with the end token: these stay free of the penalty.
        "data.max_response_length=8",
        "reward_model.reward_manager=dapo",
        f"{BUFFER}.enable=True",
        f"{BUFFER}.len=4",
        f"{BUFFER}.penalty_factor=1.0",
    ),
}
"""The keys of each curve; GRPO with the vanilla loss but for these."""

# ---------------------------------------------------------------------- what is drawn

Panel = tuple[str, ...]
"""A title, and its lines: curves, each by its name or as `label=name`."""

PAGES: dict[str, tuple[Panel, ...]] = {
    "ppo": (("PPO with a critic", "gae", "gae, PF-PPO=pf_ppo"),),
    "grpo": (("GRPO and its variants", "grpo", "Dr.GRPO=dr_grpo", "grpo_passk", "maxrl", "gdpo"),),
    "baselines": (
        ("Baselines of a group", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo"),
    ),
    "reinforce": (("REINFORCE without groups", "reinforce_plus_plus", "remax", "grpo"),),
    "optimal-baseline": (
        (
            "Baselines of least variance",
            "optimal_token_baseline",
            "tir_optimal_token_baseline",
            "grpo",
        ),
    ),
    "policy-losses": (
        (
            "Losses that treat tokens one by one",
            "vanilla=grpo",
            "cispo=loss_cispo",
            "clip_cov=loss_clip_cov",
            "kl_cov=loss_kl_cov",
            "dppo_tv=loss_dppo_tv",
            "dppo_kl=loss_dppo_kl",
        ),
        (
            "Losses that bound sequences, softly, or not at all",
            "vanilla=grpo",
            "gspo=loss_gspo",
            "geo_mean=loss_geo_mean",
            "sapo=loss_sapo",
            "gpg=loss_gpg",
            "dro=loss_dro",
        ),
    ),
    "aggregation": (
        (
            "Aggregation of token losses",
            "token-mean=grpo",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
            "seq-mean-token-mean",
        ),
    ),
    "kl": (
        (
            "Distance to the reference, coefficient 0.01",
            "none=grpo",
            "k1 in the reward=kl_k1_in_reward",
            "k3 in the loss=kl_k3_loss",
            "full in the loss=kl_full_loss",
        ),
    ),
    "rollout-correction": (
        (
            "Sampling in bfloat16, training in float32",
            "disabled=bf16_disabled",
            "decoupled_token_is=bf16_decoupled_token_is",
            "decoupled_k3_rs=bf16_decoupled_k3_rs",
            "bypass_ppo_clip=bf16_bypass_ppo_clip",
            "bypass_pg_is=bf16_bypass_pg_is",
        ),
    ),
    "dapo": (("DAPO", "grpo", "dapo"),),
}
"""The panels of each page's picture, one below the other."""

# ---------------------------------------------------------------------- running


def run(arguments: argparse.Namespace) -> int:
    names = arguments.only.split(",") if arguments.only else list(CURVES)
    unknown = [name for name in names if name not in CURVES]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(CURVES)}", file=sys.stderr)
        return 2
    output: Path = arguments.output.resolve()
    start = (arguments.start or output / "demo").resolve()
    commands = {name: overrides_of(name, start, output / name, arguments.steps) for name in names}
    for overrides in commands.values():
        load_config(overrides)  # a mistake shows before any work
    if not start.exists():
        prepare(start)
    failed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {pool.submit(train, commands[name], output / name): name for name in names}
        for done in as_completed(runs):
            name, status = runs[done], done.result()
            if status == 0:
                merge(arguments.curves, {name: read_curve(output / name)})
            else:
                failed.append(name)
            print(f"{name}: {'done' if status == 0 else last_words(output / name)}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def overrides_of(name: str, start: Path, folder: Path, steps: int) -> list[str]:
    """All keys of one curve's run."""
    return [
        *(*COMMON, *TINY, *SETTINGS),
        f"data.train_files={start / 'train.parquet'}",
        f"data.val_files={start / 'test.parquet'}",
        f"actor_rollout_ref.model.path={start / 'start'}",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={steps}",
        *CURVES[name],
    ]


def prepare(start: Path) -> None:
    """The data and the supervised start, in a folder that appears whole or not at all."""
    aside = start.with_name(f".{start.name}.{os.getpid()}.tmp")
    aside.mkdir(parents=True)
    try:
        prepare_tiny(aside)
        aside.rename(start)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def train(overrides: Sequence[str], folder: Path) -> int:
    """One run in a process of its own; what it says goes to `log.txt`. Returns its status."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, "-m", "caldera.trainer.main_ppo", *overrides]
    with (folder / "log.txt").open("w") as log:
        return subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT
        ).returncode


def last_words(folder: Path) -> str:
    lines = (folder / "log.txt").read_text(errors="replace").splitlines()
    return "\n".join(["failed", *lines[-LOG_LINES:]])


def read_curve(folder: Path) -> dict[str, Any]:
    """Validation accuracy as (step, value), and the mean reward of steps 1, 2, ..."""
    metrics = read_metrics(folder / "metrics.jsonl")
    return {
        "accuracy": [[int(step), round(value, DIGITS)] for step, value in metrics.points(ACCURACY)],
        "reward": [round(value, DIGITS) for value in metrics.values(REWARD)],
    }


def read_curves(path: Path) -> dict[str, dict[str, Any]]:
    curves: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    return curves


def merge(path: Path, new: dict[str, dict[str, Any]]) -> None:
    """Add curves to the file, or replace them in it; one a line, in the order of CURVES."""
    curves = read_curves(path) | new
    known = [name for name in CURVES if name in curves]
    others = sorted(curves.keys() - CURVES.keys())
    lines = [f"{json.dumps(name)}: {json.dumps(curves[name])}" for name in [*known, *others]]
    write_text_atomic(path, ["{\n", ",\n".join(lines), "\n}\n"])


# ---------------------------------------------------------------------- drawing

WIDTH, HEIGHT = 720, 380


def draw(arguments: argparse.Namespace) -> int:
    curves = read_curves(arguments.curves)
    for page, panels in PAGES.items():
        drawn = {curve for panel in panels for _, curve in lines_of(panel)}
        if missing := sorted(drawn - curves.keys()):
            print(f"{page}: not drawn, curves are missing: {', '.join(missing)}", file=sys.stderr)
            continue
        write_text_atomic(arguments.output / f"{page}.svg", [picture(panels, curves), "\n"])
    return 0


def lines_of(panel: Panel) -> list[tuple[str, str]]:
    """(label, name of the curve) of each line."""
    parts = [line.rpartition("=") for line in panel[1:]]
    return [(label or name, name) for label, _, name in parts]


def picture(panels: Sequence[Panel], curves: dict[str, dict[str, Any]]) -> str:
    drawn = [draw_panel(panel, curves) for panel in panels]
    if len(drawn) == 1:
        return drawn[0]
    height = HEIGHT * len(drawn)
    moved = (f'<g transform="translate(0 {HEIGHT * k})">\n{d}\n</g>' for k, d in enumerate(drawn))
    root = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join([f'{root} width="{WIDTH}" height="{height}">', *moved, "</svg>"])


def draw_panel(panel: Panel, curves: dict[str, dict[str, Any]]) -> str:
    lines = [
        Series(label, [(float(step), value) for step, value in curves[name]["accuracy"]])
        for label, name in lines_of(panel)
    ]
    return svg_curve(
        lines,
        panel[0],
        "training step",
        "held-out accuracy, greedy",
        WIDTH,
        HEIGHT,
        standalone=True,
    )


# ---------------------------------------------------------------------- command line


def main() -> int:
    parser = argparse.ArgumentParser(description="Learning curves of the algorithms.")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("run", help="train, and collect the curves")
    training.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    training.add_argument("--only", help="names of curves, separated by commas (all)")
    training.add_argument("--steps", type=int, default=200, help="training steps of a run (200)")
    training.add_argument(
        "--start",
        type=Path,
        help="folder with start/, train.parquet and test.parquet; made anew"
        " where it does not exist (OUTPUT/demo)",
    )
    training.add_argument(
        "--output", type=Path, default=Path("outputs/curves"), help="folder of the runs"
    )
    drawing = commands.add_parser("draw", help="draw a picture for each page")
    drawing.add_argument("--output", type=Path, default=PICTURES, help="folder of the pictures")
    for command in (training, drawing):
        command.add_argument(
            "--curves", type=Path, default=PICTURES / "curves.json", help="file of the curves"
        )
    arguments = parser.parse_args()
    return run(arguments) if arguments.command == "run" else draw(arguments)


if __name__ == "__main__":
    sys.exit(main())
