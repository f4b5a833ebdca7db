"""A small model on several ranks, laid out in every way that checkpoints know."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from caldera.engine.checkpoints import load, save_distributed
from caldera.engine.checkpoints.classic import save_classic
from caldera.engine.checkpoints.loading import model_tensors, optimizer_state
from caldera.errors import CheckpointError
from caldera.single_controller import Dispatch, Worker, register

PARTS = ("model", "optimizer")
MATRICES = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class Root(nn.Module):
    """The place of the engine's packed model: the model is `inner`, the loss is all it tells."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, T) -> ()
        logits = self.inner(input_ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers besides tensors, and of a matrix a tensor of another shape."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["count"] = state.get("count", 0) + 1
                state["kind"] = "counted"
                state["scale"] = torch.tensor(1.0 / state["count"])
                state.setdefault("sum", torch.zeros_like(one)).add_(one.grad)
                if one.dim() == 2:
                    state["rows"] = one.grad.square().sum(1) + state.get("rows", 0)
                one.add_(state["sum"] * state["scale"], alpha=-group["lr"])


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "counting": lambda parameters: Counting(parameters, lr=0.01),
}


class Trained:
    """A model with its optimiser, on this rank."""

    def __init__(
        self, layout: str = "local", optimizer: str = "adamw", lora: bool = False, seed: int = 0
    ) -> None:
        self.root: nn.Module = Root(_model(seed, lora))
        layers = [one for one in self.root.modules() if type(one).__name__ == "LlamaDecoderLayer"]
        kind, _, shape = layout.partition("-")
        if kind != "local":
            replicas, shards, matrices = (int(size) for size in shape.split("x"))
            mesh = init_device_mesh(
                "cpu", (replicas, shards, matrices), mesh_dim_names=("replicas", "shards", "tp")
            )
            sharding = mesh["shards"] if replicas == 1 else mesh["replicas", "shards"]
            if matrices > 1:
                for layer in layers:
                    parallelize_module(layer, mesh["tp"], MATRICES)
            if kind == "fsdp2":
                for part in (*layers, self.root):
                    fully_shard(part, mesh=sharding)
            else:
                self.root = FullyShardedDataParallel(
                    self.root,
                    auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
                    device_id=torch.device("cpu"),
                    device_mesh=sharding,
                    sharding_strategy=ShardingStrategy.HYBRID_SHARD
                    if replicas > 1
                    else ShardingStrategy.FULL_SHARD,
                    use_orig_params=kind == "fsdp_orig",
                )
        self.optimizer = OPTIMIZERS[optimizer](
            [one for one in self.root.parameters() if one.requires_grad]
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.root(torch.arange(40).reshape(4, 10) * 7 % 49)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def whole(self) -> dict[str, Any]:
        """Everything that a checkpoint should keep, gathered."""
        found: dict[str, Any] = dict(model_tensors(self.root))
        state = optimizer_state(self.root, self.optimizer)
        for name, kept in state.values.items():
            found |= {f"{name} {key}": value for key, value in kept.items()}
        found["rates"] = [group["lr"] for group in state.groups]
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            if isinstance(value, Tensor)
            else value
            for name, value in found.items()
        }


def _model(seed: int, lora: bool) -> nn.Module:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=49,  # which no number of ranks divides
        hidden_size=32,
        intermediate_size=62,  # whose half no number of ranks divides
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    if lora:
        import peft

        adapter = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, adapter)
    return model


class Layouts(Worker):
    """`Trained` on every rank of a group."""

    @register(Dispatch.ONE_TO_ALL)
    def build(self, *args: Any, **options: Any) -> None:
        self.trained = Trained(*args, **options)

    @register(Dispatch.ONE_TO_ALL)
    def train(self, steps: int) -> list[float]:
        return self.trained.train(steps)

    @register(Dispatch.ONE_TO_ALL)
    def whole(self) -> dict[str, Any] | None:
        found = self.trained.whole()
        return found if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def save(self, folder: Path, style: str) -> None:
        save(self.trained, folder, style)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, folder: Path) -> None:
        load(self.trained.root, self.trained.optimizer, folder, PARTS)

    @register(Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: Path) -> None:
        trained = self.trained
        self.pending = save_distributed(
            trained.root, trained.optimizer, folder, PARTS, asynchronous=True
        )

    @register(Dispatch.ONE_TO_ALL)
    def end_save(self) -> bool:
        self.pending.wait()
        return self.pending.done()

    @register(Dispatch.ONE_TO_ALL)
    def save_flat(self, folder: Path) -> None:
        """The optimiser's state as it is, in place of what names parameters."""
        name = f"optim_world_size_{self.world_size}_rank_{self.rank}.pt"
        torch.save(self.trained.optimizer.state_dict(), folder / name)

    @register(Dispatch.ONE_TO_ALL)
    def save_outdated(self, folder: Path) -> None:
        """What FullyShardedDataParallel makes of a model without a device mesh."""
        root = FullyShardedDataParallel(Root(_model(0, False)), device_id=torch.device("cpu"))
        name = f"model_world_size_{self.world_size}_rank_{self.rank}.pt"
        torch.save(model_tensors(root), folder / name)

    @register(Dispatch.ONE_TO_ALL)
    def failure_to_load(self, folder: Path) -> str:
        self.build("fsdp2-1x2x1")
        try:
            self.load(folder)
        except CheckpointError as error:
            return str(error)
        return ""

    @register(Dispatch.ONE_TO_ALL)
    def look(self) -> None:
        """A forward pass without gradient, which leaves parameters gathered."""
        with torch.no_grad():
            self.trained.root(torch.arange(10).reshape(1, 10))

    @register(Dispatch.ONE_TO_ALL)
    def largest_while_saving(self, folder: Path, style: str) -> int:
        """Elements of the largest tensor that came up on this rank."""
        with Largest() as seen:
            save(self.trained, folder, style)
        return seen.elements


class Largest(TorchDispatchMode):
    """Looks at the numbers that every operation returns, and of sharded tensors at the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            is_part = isinstance(one, Tensor) and not isinstance(one, DTensor)
            if is_part and one.is_floating_point():
                self.elements = max(self.elements, one.numel())
        return found


def save(trained: Trained, folder: Path, style: str) -> None:
    if style == "classic":
        save_classic(trained.root, trained.optimizer, folder, PARTS)
    else:
        save_distributed(trained.root, trained.optimizer, folder, PARTS).wait()
