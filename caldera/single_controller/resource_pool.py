"""Resource pools: which role runs on which devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from caldera.errors import ConfigError


class Role(Enum):
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"


@dataclass(frozen=True)
class ResourcePool:
    """Processes on each node."""

    process_on_nodes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)


@dataclass
class ResourcePoolManager:
    """Pools by name, such as {"global_pool": [8, 8]}, and the pool of each role."""

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = ResourcePool(tuple(processes))

    def get_resource_pool(self, role: Role) -> ResourcePool:
        name = self.mapping.get(role)
        if name not in self.resource_pool_dict:
            known = ", ".join(self.resource_pool_dict) or "none"
            raise ConfigError(
                f"role {role.value} is mapped to pool {name!r} (known pools: {known})"
            )
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        return sum(sum(processes) for processes in self.resource_pool_spec.values())
