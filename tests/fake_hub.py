"""The part of the Hugging Face Hub's API that makes repositories and takes commits, on this
machine."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0" * 40


class FakeHub:
    """Its repositories, by name: a dict of files for each."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.refusals = 0
        """How many of the next commits are refused."""
        self.tokens: set[str] = set()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in self.repositories else 200
            self.repositories.setdefault(name, {})
            is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.private.setdefault(name, is_private)
            return status, {"url": f"{self.url}/{name}", "name": name}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            small = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": f["path"], **small} for f in json.loads(body)["files"]]}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            if self.refusals:
                self.refusals -= 1
                return 403, {"error": "no storage left"}
            lines = [json.loads(line) for line in body.splitlines()]
            self.messages += [line["value"]["summary"] for line in lines if line["key"] == "header"]
            for line in lines:
                if line["key"] == "file":
                    file = line["value"]
                    content = base64.b64decode(file["content"])
                    self.repositories[found[1]][file["path"]] = content
            return 200, {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{self.url}/{found[1]}/commit/{COMMIT}",
                "hookOutput": "",
            }
        return 200, {}

    url = ""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers at `url`."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else self._chunks()
            hub.tokens.add(self.headers.get("Authorization", ""))
            self._reply(*hub.answer(urlsplit(self.path).path, body))

        def do_GET(self) -> None:
            self._reply(200, {"sha": COMMIT, "siblings": []})

        def _chunks(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return b""
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
