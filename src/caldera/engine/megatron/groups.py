"""The ranks in Megatron's arrangement: tensor, context, expert, data and pipeline parallel.

Rank numbers count the tensor-parallel place fastest, then context, data (of which expert groups are
runs), and pipeline stages slowest. Megatron keeps one arrangement for a process, so all roles that
share ranks have the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from caldera.config.megatron import MegatronConfig
from caldera.errors import ConfigError
from caldera.models.ulysses import SequenceGroup

KEY = "megatron"


@dataclass(frozen=True)
class Places:
    """This rank's place among the ranks that hold the model."""

    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    ep_rank: int
    ep_size: int
    ep_group: dist.ProcessGroup
    copies: dist.ProcessGroup
    """Ranks that hold the same parameters, experts aside: data x context parallel."""
    sequence: SequenceGroup
    """Ranks that share the tokens of a micro-batch: context parallel."""
    dp_rank: int
    dp_size: int
    virtual_stages: int

    @property
    def is_dp_leader(self) -> bool:
        """The last stage has the outputs first."""
        is_last = self.pp_rank == self.pp_size - 1
        return is_last and self.tp_rank == 0 and self.sequence.rank == 0

    @property
    def model_parallel_size(self) -> int:
        return self.tp_size * self.pp_size * self.sequence.size


def arrange(config: MegatronConfig) -> Places:
    """Make the groups of ranks that the config asks for, or find existing ones."""
    sizes = _sizes(config)
    _check(sizes, dist.get_world_size())
    if parallel_state.model_parallel_is_initialized():
        _compare(sizes)
    else:
        parallel_state.initialize_model_parallel(
            **{key: size for key, size in sizes.items() if not key.startswith("virtual")},
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        )
        with torch.random.fork_rng(devices=[]):  # on a CPU it would seed everybody's generator
            tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    sequence = SequenceGroup()
    if sizes["context_parallel_size"] > 1:
        sequence = SequenceGroup(
            parallel_state.get_context_parallel_rank(),
            sizes["context_parallel_size"],
            parallel_state.get_context_parallel_group(),
        )
    return Places(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=sizes["tensor_model_parallel_size"],
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=sizes["pipeline_model_parallel_size"],
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=sizes["expert_model_parallel_size"],
        ep_group=parallel_state.get_expert_model_parallel_group(),
        copies=parallel_state.get_data_parallel_group(with_context_parallel=True),
        sequence=sequence,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        virtual_stages=sizes["virtual_pipeline_model_parallel_size"],
    )


def _sizes(config: MegatronConfig) -> dict[str, int]:
    expert_tensor = config.expert_tensor_parallel_size
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size or 1,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1 if expert_tensor is None else expert_tensor,
    }


def _check(sizes: dict[str, int], world: int) -> None:
    tensor, stages = sizes["tensor_model_parallel_size"], sizes["pipeline_model_parallel_size"]
    context, experts = sizes["context_parallel_size"], sizes["expert_model_parallel_size"]
    for key, size in {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": context,
        "expert_model_parallel_size": experts,
        "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size": (
            tensor * stages * context
        ),
        "expert_model_parallel_size x pipeline_model_parallel_size": experts * stages,
    }.items():
        if size < 1 or world % size:
            raise ConfigError(f"{KEY}.{key}={size} does not divide the {world} ranks")
    if sizes["virtual_pipeline_model_parallel_size"] > 1 and stages == 1:
        raise ConfigError(
            f"{KEY}.virtual_pipeline_model_parallel_size="
            f"{sizes['virtual_pipeline_model_parallel_size']} needs "
            f"{KEY}.pipeline_model_parallel_size of 2 or more"
        )
    if sizes["expert_tensor_parallel_size"] != 1:
        raise ConfigError(
            f"{KEY}.expert_tensor_parallel_size={sizes['expert_tensor_parallel_size']}: takes 1 or "
            "null; an expert is whole on its rank"
        )


def _compare(sizes: dict[str, int]) -> None:
    """Complain of the first size that is not that of the arrangement."""
    found = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        ),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    for key, size in found.items():
        if sizes[key] != size:
            raise ConfigError(
                f"{KEY}.{key}={sizes[key]}: another role on these ranks has {size}, and roles that "
                "share ranks must have the same"
            )
