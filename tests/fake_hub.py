"""The part of the Hugging Face Hub's API that makes repositories, takes commits and hands out data
sets, on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40


class FakeHub:
    """Its repositories, by name: a dict of files for each."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.data_sets: dict[str, dict[str, bytes]] = {}
        """Their files, by name; at a revision, as name@revision."""
        self.asked: list[str] = []
        """Files of data sets that were asked for."""
        self.refusals = 0
        """How many of the next commits are refused."""
        self.tokens: set[str] = set()

    def look_up(self, path: str) -> tuple[int, Any]:
        """A list of files (as JSON), or the bytes of one."""
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            files = self._data_set(found[1], found[2])
            if files is not None:
                siblings = [{"rfilename": name} for name in files]
                return 200, {"id": found[1], "sha": _commit(found[2]), "siblings": siblings}
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            files = self._data_set(found[1], found[2]) or {}
            if found[3] in files:
                self.asked.append(found[3])
                return 200, files[found[3]]
        return 404, {"error": "Repository not found"}

    def _data_set(self, name: str, revision: str | None) -> dict[str, bytes] | None:
        known = {_commit(at): f"{name}@{at}" for at in ("v1",)} | {_commit(None): name}
        return self.data_sets.get(known.get(_commit(revision), name))

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


def _commit(revision: str | None) -> str:
    """The commit that a branch, a tag or a commit stands for."""
    return {None: COMMIT, "main": COMMIT, "v1": "1" * 40}.get(revision, str(revision))


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        self._reply(*self.hub.answer(urlsplit(self.path).path, body))

    def do_GET(self) -> None:
        self._reply(*self.hub.look_up(unquote(urlsplit(self.path).path)))

    def do_HEAD(self) -> None:
        self.do_GET()

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
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if "/resolve/" in self.path:
            self.send_header(
                "X-Repo-Commit", _commit(self.path.split("/resolve/")[1].split("/")[0])
            )
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers at `url`."""
    hub = FakeHub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
