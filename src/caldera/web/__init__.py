"""What every HTTP server has in common: limits, bodies, and a server of threads."""

from __future__ import annotations

from caldera.web.limits import error_text, read_json, read_object
from caldera.web.threads import JsonHandler, ThreadedServer

__all__ = ["JsonHandler", "ThreadedServer", "error_text", "read_json", "read_object"]
