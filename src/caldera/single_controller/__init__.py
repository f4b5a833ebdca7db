"""One controller, many workers: registration, dispatch, groups, resource pools."""

from __future__ import annotations

from caldera.single_controller.decorator import (
    Dispatch,
    Execute,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from caldera.single_controller.dispatching import (
    Balancing,
    Pending,
    make_nd_compute_dataproto_dispatch_fn,
)
from caldera.single_controller.in_process import (
    InProcessWorkerGroup,
    LocalWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from caldera.single_controller.processes import ProcessWorkerGroup
from caldera.single_controller.resource_pool import (
    ResourcePool,
    ResourcePoolManager,
    Role,
    merge_resource_pool,
    split_resource_pool,
)
from caldera.single_controller.worker import Worker
from caldera.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = [
    "Balancing",
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "InProcessWorkerGroup",
    "LocalWorkerGroup",
    "Pending",
    "ProcessWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]
