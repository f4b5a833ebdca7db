"""A remote server as a sampler: tokens go over, tokens come back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from caldera.config.samplers import RemoteConfig
from caldera.errors import ConfigError, RolloutError, UnsupportedError
from caldera.rollout import AsyncSampler, RemoteRollout, Request, SamplingParams

pytest.importorskip("httpx2")
CPU = torch.device("cpu")


class Server(ThreadingHTTPServer):
    """Counts on from the last token of the prompt; gives up on 113."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.models = ["m"]
        self.with_ids = True
        self.secret: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        secret = self.server.secret
        if secret is not None and self.headers["Authorization"] != f"Bearer {secret}":
            self.send_error(401)
            return
        self._answer({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        count, last = body["max_tokens"], body["prompt"][-1]
        choice: dict[str, Any] = {
            "finish_reason": "abort" if last == 113 else "length",
            "logprobs": {"token_logprobs": [-0.5] * count},
        }
        if self.server.with_ids:
            choice["token_ids"] = list(range(last + 1, last + 1 + count))
        self._answer({"choices": [choice]})

    def _answer(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def remote(server: Server, llama: torch.nn.Module, config: Any) -> Iterator[RemoteRollout]:
    made = RemoteRollout(config(name="remote", remote=RemoteConfig(server.url)), llama, CPU)
    yield made
    made.close()


def test_tokens_come_back_in_order(remote: RemoteRollout, server: Server) -> None:
    params = SamplingParams(3, temperature=0.5, stop_token_ids=frozenset({9}))
    found = remote.generate([Request([n, n + 1], params, 2**40 + n) for n in range(20)])
    assert [each.token_ids for each in found] == [[n + 2, n + 3, n + 4] for n in range(20)]
    assert found[0].log_probs == [-0.5] * 3 and found[0].finish_reason == "length"
    body = next(body for body in server.bodies if body["prompt"] == [4, 5])
    assert (body["model"], body["temperature"], body["seed"]) == ("m", 0.5, 4)
    assert body["stop_token_ids"] == [9] and body["return_token_ids"] is True


def test_weights_are_refused(remote: RemoteRollout, server: Server) -> None:
    with pytest.raises(RolloutError, match=rf"rollout.remote.url='{server.url}'.*weights"):
        remote.load_weights([], 1)


def test_a_server_that_asks_for_a_key(
    server: Server, llama: torch.nn.Module, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.secret = "sesame"

    def ask() -> list[int]:
        keys = config(name="remote", remote=RemoteConfig(server.url))
        made = RemoteRollout(keys, llama, CPU)
        try:
            return made.generate([Request([1], SamplingParams(2), 0)])[0].token_ids
        finally:
            made.close()

    with pytest.raises(RolloutError, match="CALDERA_API_KEY is not set, and it asks for"):
        ask()
    monkeypatch.setenv("CALDERA_API_KEY", "simsim")
    with pytest.raises(RolloutError, match="CALDERA_API_KEY is not the one that it asks") as caught:
        ask()
    assert "simsim" not in str(caught.value)
    monkeypatch.setenv("CALDERA_API_KEY", "sesame")
    assert ask() == [2, 3]


def test_a_server_without_token_ids(remote: RemoteRollout, server: Server) -> None:
    server.with_ids = False
    with pytest.raises(RolloutError, match="lacks token_ids"):
        remote.generate([Request([1], SamplingParams(2), 0)])
    assert not remote.has_work()


def test_a_request_that_the_server_ends_fails_alone(remote: RemoteRollout) -> None:
    asked = [Request([prompt], SamplingParams(2), 0) for prompt in (1, 113)]
    with pytest.raises(RolloutError, match="ended a request with 'abort'"):
        remote.generate(asked)
    assert not remote.has_work()

    async def both() -> list[Any]:
        async with AsyncSampler(remote) as sampler:
            calls = [sampler.generate(request) for request in asked]
            return await asyncio.gather(*calls, return_exceptions=True)

    fine, failed = asyncio.run(both())
    assert fine.token_ids == [2, 3] and isinstance(failed, RolloutError)


def test_a_server_with_several_models(remote: RemoteRollout, server: Server) -> None:
    server.models = ["a", "b"]
    with pytest.raises(
        RolloutError, match=r"the models a, b: rollout\.remote\.model must name one"
    ):
        remote.generate([Request([1], SamplingParams(2), 0)])


def test_what_it_cannot_tell(remote: RemoteRollout) -> None:
    with pytest.raises(UnsupportedError, match=r"prompt_logprobs=True"):
        remote.generate([Request([1], SamplingParams(2, prompt_logprobs=True), 0)])


def test_it_needs_an_address(llama: torch.nn.Module, config: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.remote\.url=null"):
        RemoteRollout(config(name="remote"), llama, CPU)


@pytest.mark.parametrize(
    ("key", "value"), [("enable_prefix_caching", True), ("logprobs_mode", "raw_logprobs")]
)
def test_what_the_server_decides_is_refused(
    llama: torch.nn.Module, config: Any, server: Server, key: str, value: object
) -> None:
    given = config(name="remote", remote=RemoteConfig(server.url), **{key: value})
    with pytest.raises(UnsupportedError, match=f"rollout.{key}={value!r}: takes .*, not remote"):
        RemoteRollout(given, llama, CPU)
