"""The worker of supervised training: one model that is trained on an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from caldera.config import (
    CheckpointConfig,
    ModelConfig,
    SFTDataConfig,
    SFTTrainerConfig,
)
from caldera.core_algos import LossScale
from caldera.data import Batch, create_sft_dataset, token_batch
from caldera.data.loader import RowSource
from caldera.engine import (
    Engine,
    ForwardPlan,
    LossAndMetrics,
    LossFn,
    OutputName,
    Outputs,
)
from caldera.models.forward import without_adapter
from caldera.models.loading import Built, build_policy
from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.workers.building import (
    WORKERS,
    TrainedWorker,
    register_mesh,
    role_engine,
)
from caldera.workers.phases import on_device, train_epochs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ---- What supervised training minimises, and on which rows: one value for each kind of it

MODEL_KEY = "model"


def never(config: SFTTrainerConfig) -> bool:
    return False


@dataclass(frozen=True)
class Objective:
    """One kind of supervised training. It travels to other processes, so its functions are those
    of modules."""

    name: str
    dataset: Callable[[list[str], SFTDataConfig, PreTrainedTokenizerBase], RowSource]
    """(files, the keys of the data, tokenizer) -> items."""
    collate: Callable[[Sequence[dict[str, Any]], int], Batch]
    """(items, padding token) -> rows as engines take them, `rows_together` for each item: the first
    token is the prompt, all others are the response, and response_mask has what is trained."""
    build: Callable[[ModelConfig, torch.dtype, int, str, bool], Built]
    """(model keys, precision, seed, their group, whether it is to be without values) -> model."""
    outputs: tuple[OutputName, ...]
    """What the loss reads of the model."""
    loss: Callable[[SFTTrainerConfig], LossFn]
    """Its metrics are logged as train/NAME and val/NAME. Validation gives it the outputs of whole
    batches, and the counts of the whole validation set."""
    rows_together: int = 1
    """How many rows an item is: those of one are never apart, on ranks or in micro-batches."""
    needs_reference: Callable[[SFTTrainerConfig], bool] = never
    """Whether rows get `ref_log_prob`, those of the model as it was before the run."""


def likelihood_loss(config: SFTTrainerConfig) -> LossFn:
    """Minus the mean log-probability of the trained tokens."""

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        mask = tensors_of(rows)["response_mask"]  # (B, R)
        loss = scale.aggregate(-outputs["log_probs"], mask, "token-mean")
        return loss, {"loss": loss.detach()}

    return loss_fn


FINE_TUNING = Objective(
    name="sft",
    dataset=create_sft_dataset,
    collate=token_batch,
    build=build_policy,
    outputs=("log_probs",),
    loss=likelihood_loss,
)
"""Supervised fine-tuning: the responses of the data become likely."""


MESH = "supervised"
ON_MODEL = make_nd_compute_dataproto_dispatch_fn(MESH)
TRAIN = "train"


@WORKERS.register("supervised")
class SupervisedWorker(TrainedWorker):
    """Rows are as `Objective.collate` makes them."""

    def __init__(
        self, config: SFTTrainerConfig, objective: Objective, total_steps: int, device: str
    ) -> None:
        super().__init__()
        self.config = config
        self.objective = objective
        self.total_steps = total_steps
        self.device = torch.device(device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights, and build the engine and, where there is one, the reference."""
        config, model = self.config, self.config.model
        self.engine = self._build_engine(
            optim=config.optim.for_engine(self.total_steps),
            grad_clip=config.optim.clip_grad,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            activation_offload=model.enable_activation_offload,
            checkpoint=config.trainer.checkpoint,
        )
        register_mesh(self, MESH, self.engine)
        self.reference = self._build_reference()
        self.engine.offload()

    @register(dispatch_mode=ON_MODEL, in_mini_batches=True)
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimiser step on the batch; returns metrics alone, `train/loss` among them."""
        self._add_reference(data)
        with on_device(self.engine, optimizer=True):
            metrics = train_epochs(
                self.engine,
                data,
                self.objective.loss(self.config),
                self._plan(),
                len(data) * self.engine.dp_size,
                1,
                None,
                TRAIN,
            )
        mfu = metrics.pop(f"perf/mfu/{TRAIN}", None)
        told = {k if "/" in k else f"{TRAIN}/{k}": v for k, v in metrics.items()}
        return DataProto(meta_info={"metrics": told | ({} if mfu is None else {"train/mfu": mfu})})

    @register(dispatch_mode=ON_MODEL)
    def evaluate(self, data: DataProto) -> DataProto:
        """What the loss reads of the model, and `ref_log_prob` where it reads the reference."""
        with on_device(self.engine):
            outputs = {str(k): v for k, v in self.engine.infer(data, self._plan()).items()}
        self._add_reference(data)
        added = ("ref_log_prob",) if self.reference is not None else ()
        return DataProto.from_dict(outputs | {key: tensors_of(data)[key] for key in added})

    def _trained(self) -> tuple[Engine, CheckpointConfig, ModelConfig]:
        return self.engine, self.config.trainer.checkpoint, self.config.model

    def _build_engine(self, **options: Any) -> Engine:
        model = self.config.model
        return role_engine(
            model.strategy,
            model.fsdp_config,
            model.megatron,
            self.device,
            lambda dtype, seed, empty: self.objective.build(model, dtype, seed, MODEL_KEY, empty),
            sequence_parallel=self.config.ulysses_sequence_parallel_size,
            **options,
        )

    def _build_reference(self) -> Engine | None:
        """With an adapter it is the model itself, to be run without it."""
        if not self.objective.needs_reference(self.config):
            return None
        if self.config.model.has_adapter:
            return self.engine
        engine = self._build_engine()
        engine.offload()
        return engine

    def _add_reference(self, data: DataProto) -> None:
        if self.reference is None:
            return
        with on_device(self.reference), without_adapter(self.reference.module):
            outputs = self.reference.infer(data, self._plan())
        tensors_of(data)["ref_log_prob"] = outputs["log_probs"]

    def _plan(self) -> ForwardPlan:
        data, together = self.config.data, self.objective.rows_together
        samples = data.micro_batch_size_per_gpu
        return ForwardPlan(
            self.objective.outputs,
            bool(data.use_dynamic_bsz),
            None if samples is None else samples * together,
            data.max_token_len_per_gpu,
            rows_together=together,
        )
