"""The keys of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.fields import ConfigGroup, listed, option, refused


@dataclass
class RunKeys(ConfigGroup):
    """What trainings of every kind have: name, length, devices, checkpoints."""

    project_name: str = "caldera_examples"
    """Project under which loggers file the run."""
    experiment_name: str = "gsm8k"
    """Name of the run."""
    total_epochs: int = option(30, minimum=1, unit="epochs")
    """Passes over the training data."""
    total_training_steps: int | None = option(None, minimum=1, unit="steps")
    """Steps of the whole run; null: total_epochs times the batches of an epoch."""
    class_: str | None = None
    """The trainer: a name that is registered, or a class as my.module.MyTrainer or
    path/to/file.py:MyTrainer; null: the command's own."""
    logger: Any = listed("console", "file")
    """Where metrics go: names of loggers."""
    console_metrics: Any = None
    """Metrics on the console's line of a step: `short` (about ten), `all`, or patterns such as
    [short,critic/*]; null: short where another logger keeps the rest, else all."""
    callbacks: Any = listed()
    """Functions that are called after each step as `callback(step, metrics)`, each as
    path/to/file.py:function or pkg://my.module:function; one that raises caldera.StopTraining ends
    the run."""
    nnodes: int = option(1, minimum=1, unit="nodes")
    """Machines of the run; more than one needs Ray."""
    n_gpus_per_node: int | None = option(None, minimum=1, unit="devices")
    """Devices (GPUs, or processes on a CPU) a node; null: all GPUs, or one process on a CPU."""
    worker_group: str | None = option(None, choices=("local", "ray"))
    """Where workers live: processes of this machine, or Ray's. null: Ray for several nodes, or
    where RAY_ADDRESS names a cluster; else local."""
    device: str | None = option(None, choices=("cuda", "cpu"))
    """Where models live; null: cuda where there is a GPU, else cpu."""
    save_freq: int = option(-1, unit="steps")
    """Steps between checkpoints, the last step included; -1: none."""
    test_freq: int = option(-1, unit="steps")
    """Steps between validations, the last step included; -1: none."""
    resume_mode: str = option("auto", choices=("auto", "disable", "resume_path"))
    """Go on from the newest checkpoint, start anew, or go on from resume_from_path."""
    resume_from_path: str | None = None
    """A global_step_N folder or its URL, for resume_mode=resume_path."""
    resume_fallback: bool = False
    """With resume_mode=auto: where files of the newest checkpoint are damaged, go on from the one
    before it, with a warning. Otherwise that is an error."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run: checkpoints, metrics, resolved config."""
    default_hdfs_dir: str | None = None
    """URL of a folder that checkpoints are copied to, such as s3://bucket/run, hdfs://host/run or
    file:///run. A run goes on from there where its own folder has no newer one. null: none."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face Hub, as name or owner/name, that each checkpoint is pushed to;
    made, and private, where there is none. null: none."""
    del_local_ckpt_after_load: bool = False
    """Delete the local copy of a checkpoint once it was loaded, where there is one behind a URL."""
    ray_wait_register_center_timeout: int = option(300, minimum=1, unit="seconds")
    """How long to wait for places that other runs hold on a Ray cluster, and for ranks to start."""

    def checkpoints_to_keep(self, role: str) -> int | None:
        """How many of the newest checkpoints keep this role; None: all."""
        return None


@dataclass
class TrainerConfig(RunKeys):
    balance_batch: bool = True
    """Deal samples to ranks so that all have the same work."""
    wandb_proxy: str | None = None
    """Proxy through which the logger wandb reaches its server; null: none."""
    log_val_generations: int = option(0, minimum=0, unit="samples")
    """Validation responses that every logger shows at each validation, if it can as a table."""
    rollout_data_dir: str | None = None
    """Folder for every training response, one JSON-lines file a step; null: not kept."""
    validation_data_dir: str | None = None
    """Folder for every validation response; null: not kept."""
    max_restarts: int = option(0, minimum=0, unit="restarts")
    """How often a run whose workers died goes on from its last checkpoint by itself."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    critic_warmup: int = option(0, minimum=0, unit="steps")
    """First step in which the actor is trained; before it the critic trains alone."""
    max_actor_ckpt_to_keep: int | None = option(None, minimum=1, unit="checkpoints")
    """Newest checkpoints whose actor is kept; null: all."""
    max_critic_ckpt_to_keep: int | None = option(None, minimum=1, unit="checkpoints")
    """Newest checkpoints whose critic is kept; null: all."""
    esi_redundant_time: int = refused(0, "checkpoints are written by save_freq alone")
    use_legacy_worker_impl: str = refused("auto", "there is one implementation of the workers")

    def checkpoints_to_keep(self, role: str) -> int | None:
        return self.max_actor_ckpt_to_keep if role == "actor" else self.max_critic_ckpt_to_keep
