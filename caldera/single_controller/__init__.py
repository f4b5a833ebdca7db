"""One controller, many workers: registration, dispatch, groups, resource pools."""

from __future__ import annotations

from caldera.single_controller.decorator import Dispatch, Execute, register
from caldera.single_controller.resource_pool import ResourcePool, ResourcePoolManager, Role
from caldera.single_controller.worker import Worker
from caldera.single_controller.worker_group import LocalWorkerGroup

__all__ = [
    "Dispatch",
    "Execute",
    "LocalWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "register",
]
