"""The scripts of examples/cluster: they can be read, and start the run that they promise.

tests/ray starts real nodes with start_head.sh and start_worker.sh. Slurm and Kubernetes are not
here: what they would be told is checked instead.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from caldera.config import PPOTrainerConfig, load_config
from caldera.trainer.entry import split_overrides

EXAMPLES = Path(__file__).parents[2] / "examples/cluster"
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")])
SLURM = {
    # More lines than a pipe holds: who reads the first one alone ends the program.
    "scontrol": "echo first; seq 100000",
    "getent": 'echo "10.1.2.3 STREAM $2"; seq 100000',
    # Runs the command that follows its own options.
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": 'printf "%s\\n" "$@" >"$OUT/arguments"; env >"$OUT/environment"',
}
"""What stands for the programs of a Slurm node."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_read(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert script.read_text().startswith("#!")
    assert script.suffix == ".sbatch" or os.access(script, os.X_OK)


def run_config(command: list[str], folder: Path) -> PPOTrainerConfig:
    """The config of a `caldera train` with a file `run`, which is put into the folder."""
    assert command[:2] == ["caldera", "train"]
    (folder / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "defaults": ["ppo_trainer", "_self_"],
                "data": {"train_files": "train.parquet", "val_files": "test.parquet"},
                "actor_rollout_ref": {
                    "model": {"path": "model"},
                    "actor": {"use_dynamic_bsz": True},
                },
            }
        )
    )
    options, overrides = split_overrides(command[2:])
    assert options[::2] == ["--config-path", "--config-name"] and options[3] == "run"
    return load_config(overrides, "run", str(folder))


def test_slurm(tmp_path: Path) -> None:
    """The script with two nodes of eight GPUs, on a machine without Slurm."""
    (tmp_path / "bin").mkdir()
    for name, body in SLURM.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/usr/bin/env bash\n{body}\n")
        program.chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OUT": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "4321", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "64",
        "SLURM_GPUS_ON_NODE": "8",
    }  # fmt: skip
    given = ["--config-path", "configs", "--config-name", "run", "trainer.total_epochs=3"]
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm.sbatch", *given], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    arguments = (tmp_path / "arguments").read_text().splitlines()
    split = arguments.index("--")
    assert arguments[:split] == [
        "symmetric-run", "--address", "10.1.2.3:24321", "--min-nodes", "2", "--num-cpus=64",
        "--disable-usage-stats",
    ]  # fmt: skip
    variables = dict(
        line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines()
    )
    assert variables["RAY_ADDRESS"] == "10.1.2.3:24321" and variables["RAY_AUTH_MODE"] == "token"
    assert len(variables["RAY_AUTH_TOKEN"]) > 20
    trainer = run_config(arguments[split + 1 :], tmp_path).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.device) == (2, 8, "cuda")
    assert (trainer.worker_group, trainer.total_epochs) == ("ray", 3)


def check_container(pod: dict[str, Any]) -> dict[str, Any]:
    """The one container of a pod, which mounts every volume."""
    container: dict[str, Any]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["image"] == "registry.example.com/caldera:cuda"
    return container


def test_kubernetes_on_one_machine(tmp_path: Path) -> None:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubernetes/job.yaml").read_text())
    assert job["metadata"]["name"] == "caldera"  # by which docs/cluster.md finds the log
    container = check_container(job["spec"]["template"]["spec"])
    assert "command" not in container  # the image starts `caldera`
    trainer = run_config(["caldera", *container["args"]], tmp_path).trainer
    assert trainer.n_gpus_per_node == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert (trainer.nnodes, trainer.device, trainer.resume_mode) == (1, "cuda", "auto")
    (shared,) = (m for m in container["volumeMounts"] if m["name"] == "shared")
    assert trainer.default_local_dir.startswith(shared["mountPath"])


def test_kubernetes_on_several_machines(tmp_path: Path) -> None:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubernetes/rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["name"] == "caldera"  # by which docs/cluster.md finds the log
    spec = job["spec"]
    assert spec.keys() == {
        "entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit",
        "rayClusterSpec",
    }  # fmt: skip
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    containers = []
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        containers.append(check_container(group["template"]["spec"]))
    config = run_config(shlex.split(spec["entrypoint"]), tmp_path)
    trainer, gpus = config.trainer, containers[1]["resources"]["limits"]["nvidia.com/gpu"]
    assert (trainer.nnodes, trainer.n_gpus_per_node) == (workers["replicas"], int(gpus))
    assert (trainer.worker_group, trainer.device) == ("ray", "cuda")


def test_the_ray_of_the_example_is_the_one_that_is_tested() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes/rayjob.yaml").read_text())
    pins = (EXAMPLES.parents[1] / "constraints.txt").read_text().splitlines()
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']}" in pins
