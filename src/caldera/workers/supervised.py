"""The worker of supervised training: one model that is trained on an objective."""

from __future__ import annotations

import torch

from caldera.config import CheckpointConfig, FSDPConfig, ModelConfig, SFTTrainerConfig
from caldera.engine import Engine, EngineOptions, ForwardPlan
from caldera.models.forward import without_adapter
from caldera.models.loading import DTYPES, Built
from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.workers.building import (
    build_engine,
    compiles,
    megatron_of,
    memory_of,
    register_mesh,
)
from caldera.workers.choosing import WORKERS
from caldera.workers.objective import Objective
from caldera.workers.phases import on_device
from caldera.workers.trained import TrainedWorker
from caldera.workers.updates import train_epochs

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
        memory = self._memory()
        options = EngineOptions(
            memory, config.optim.for_engine(self.total_steps), config.optim.clip_grad,
            config.ulysses_sequence_parallel_size, model.enable_gradient_checkpointing,
            model.enable_activation_offload, compiles(self.device, memory.use_torch_compile),
            config.trainer.checkpoint, megatron=megatron_of(model.strategy, model.megatron),
        )  # fmt: skip
        self.engine = build_engine(model.strategy, self._build, self.device, options)
        register_mesh(self, MESH, self.engine)
        self.reference = self._build_reference()
        self.engine.offload()

    @register(dispatch_mode=ON_MODEL, in_mini_batches=True)
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimiser step on the batch; returns metrics alone, `train/loss` among them."""
        self._add_reference(data)
        with on_device(self.engine, optimizer=True):
            metrics = train_epochs(
                self.engine, data, self.objective.loss(self.config), self._plan(),
                len(data) * self.engine.dp_size, 1, None, TRAIN,
            )  # fmt: skip
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

    def _build(self, empty: bool) -> Built:
        memory = self._memory()
        return self.objective.build(self.config, DTYPES[memory.model_dtype], memory.seed, empty)

    def _memory(self) -> FSDPConfig:
        model = self.config.model
        return memory_of(model.strategy, model.fsdp_config, model.megatron, self.device)

    def _build_reference(self) -> Engine | None:
        """With an adapter it is the model itself, to be run without it."""
        if not self.objective.needs_reference(self.config):
            return None
        model, memory = self.config.model, self._memory()
        if model.has_adapter:
            return self.engine
        options = EngineOptions(
            memory,
            sequence_parallel=self.config.ulysses_sequence_parallel_size,
            compiles=compiles(self.device, memory.use_torch_compile),
            megatron=megatron_of(model.strategy, model.megatron),
        )
        engine = build_engine(model.strategy, self._build, self.device, options)
        engine.offload()
        return engine

    def _add_reference(self, data: DataProto) -> None:
        if self.reference is None:
            return
        with on_device(self.reference), without_adapter(self.reference.module):
            outputs = self.reference.infer(data, self._plan())
        tensors_of(data)["ref_log_prob"] = outputs["log_probs"]

    def _plan(self) -> ForwardPlan:
        data = self.config.data
        return ForwardPlan(
            self.objective.outputs, data.use_dynamic_bsz,
            data.micro_batch_size_per_gpu * self.objective.rows_together,
            data.max_token_len_per_gpu, rows_together=self.objective.rows_together,
        )  # fmt: skip
