"""Programs that a model wrote, run where they can do no harm."""

from __future__ import annotations

from caldera.sandbox.fusion import SandboxFusionClient
from caldera.sandbox.limits import Limits, Outcome, Status
from caldera.sandbox.pool import Sandbox

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxFusionClient", "Status"]
