"""Models behind HTTP: the protocol of OpenAI over any sampler, and what its sessions sampled."""

from __future__ import annotations

from caldera.serving.chat_model import ChatModel
from caldera.serving.recording import Recorder, Trajectory, Turn
from caldera.serving.server import Account, SessionServer

__all__ = ["Account", "ChatModel", "Recorder", "SessionServer", "Trajectory", "Turn"]
