"""The manifests of examples/cluster/kubernetes fit the schema of Kubernetes.

KubeRay's own kinds are not in it: the pods in them are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples/cluster/kubernetes"
KUBERNETES = "1.37"


def check(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def pod(template: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "pod", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_the_job() -> None:
    job = yaml.safe_load((FOLDER / "job.yaml").read_text())
    check(job)
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = ""
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        check(job)


def test_the_pods_of_the_rayjob() -> None:
    cluster = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check(pod(group["template"]))
