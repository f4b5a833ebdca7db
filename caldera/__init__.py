"""Caldera: reinforcement learning of language models."""

from __future__ import annotations

from caldera.protocol import DataProto

__version__ = "0.1.0"

__all__ = ["DataProto", "__version__"]
