"""Programs that a model wrote, run where they can do no harm."""

from __future__ import annotations

from caldera.reward.sandbox.client import SandboxFusionClient
from caldera.reward.sandbox.limits import Limits, Outcome, Status
from caldera.reward.sandbox.pool import Sandbox

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxFusionClient", "Status"]
