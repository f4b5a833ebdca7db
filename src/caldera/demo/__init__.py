"""The demonstration: a small model that learns while you watch."""

from __future__ import annotations

from caldera.demo.run import tiny_model

__all__ = ["tiny_model"]
