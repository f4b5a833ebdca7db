"""The search tool, and the client of a retrieval service that may be down, slow or mad."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from caldera.errors import ConfigError
from caldera.tools import search
from caldera.tools.formats import FunctionCall
from caldera.tools.running import ToolOutcome, ToolRunner, ToolState
from caldera.tools.search import Document, RetrievalFailed, RetrieverClient, SearchTool

GOOD = "good"
HIT = {"document": {"id": "1", "contents": '"Rome"\nRome is in Italy.'}, "score": 1.0}


class Service(ThreadingHTTPServer):
    """Answers as its script says, one entry a request; then well."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = []
        self.requests: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/retrieve"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        behaviour = self.server.script.pop(0) if self.server.script else GOOD
        if behaviour == "slow":
            time.sleep(0.5)
        if behaviour == "drop":
            return
        if behaviour == "drip":  # each byte comes in time, the answer does not
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            with suppress(OSError):
                for _ in range(20):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
            return
        status = behaviour if isinstance(behaviour, int) else 200
        body = json.dumps({"result": [[HIT] * request["topk"] for _ in request["queries"]]})
        if isinstance(behaviour, str) and behaviour.startswith(("{", "<", "[")):
            body = behaviour
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def ask(client: RetrieverClient, *queries: str) -> list[list[Document]]:
    try:
        return await client.search(queries)
    finally:
        await client.close()


def client_of(service: Service, **options: Any) -> RetrieverClient:
    return RetrieverClient(service.url, topk=2, first_pause=0.01, **options)


def test_a_client_reads_passages(service: Service) -> None:
    found = asyncio.run(ask(client_of(service), "a", "b"))
    assert found == [[Document("Rome", "Rome is in Italy.")] * 2] * 2
    assert service.requests == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]


def test_titles() -> None:
    assert Document.of('"The "Rome" film"\na\nb') == Document('The "Rome" film', "a\nb")
    assert Document.of("no title") == Document("", "no title")


@pytest.mark.parametrize(
    "behaviour",
    [
        503, 429, "drop", "slow", "drip", "<html>", "{}", "[" * 100_000, '{"result": [[]]}',
        '{"result": [[1], [2]]}',
    ],
)  # fmt: skip
def test_what_may_pass_is_asked_for_again(behaviour: Any, service: Service) -> None:
    service.script = [behaviour, behaviour]
    client = client_of(service, timeout=0.2)
    assert len(asyncio.run(ask(client, "a", "b"))) == 2
    assert len(service.requests) == 3


def test_passages_that_no_tokenizer_takes_are_mended(service: Service) -> None:
    service.script = ['{"result": [[{"contents": "\\"A\\"\\nhalf \\ud83d"}]]}']
    assert asyncio.run(ask(client_of(service), "a")) == [[Document("A", "half ?")]]


def test_hundreds_of_searches_share_few_connections(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, most, lock = 0, 0, threading.Lock()
    answer = Handler.do_POST

    def counted(handler: Handler) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        answer(handler)
        with lock:
            now -= 1

    monkeypatch.setattr(Handler, "do_POST", counted)
    monkeypatch.setattr(search, "MOST_AT_A_TIME", 16)

    async def many() -> list[Any]:
        client = client_of(service)
        try:
            return await asyncio.gather(*(client.search([f"{n}"]) for n in range(300)))
        finally:
            await client.close()

    assert len(asyncio.run(many())) == 300
    assert 1 < most <= 16


def test_a_refusal_is_final(service: Service) -> None:
    service.script = [422]
    with pytest.raises(RetrievalFailed, match="refuses the query, status 422"):
        asyncio.run(ask(client_of(service), "a"))
    assert len(service.requests) == 1


def test_a_query_that_cannot_be_sent_is_mended(service: Service) -> None:
    assert len(asyncio.run(ask(client_of(service, attempts=1), "half \ud83d", "b"))) == 2
    assert [request["queries"] for request in service.requests] == [["half ?", "b"]]


def test_an_address_that_makes_no_sense_is_not_tried_again() -> None:
    client = RetrieverClient("http://127.0.0.1:port/retrieve", first_pause=3600)
    with pytest.raises(RetrievalFailed, match=r"cannot be asked: .*port"):
        asyncio.run(asyncio.wait_for(ask(client, "a"), 30))


def test_attempts_end(service: Service) -> None:
    service.script = [500] * 3
    with pytest.raises(RetrievalFailed, match="does not work: status 500"):
        asyncio.run(ask(client_of(service, attempts=3), "a"))
    service.server_close()
    with pytest.raises(RetrievalFailed, match="does not work: "):
        asyncio.run(ask(client_of(service, attempts=2), "a"))


# ---------------------------------------------------------------------- the tool


def call(tool: SearchTool, arguments: str) -> ToolOutcome:
    async def run() -> ToolOutcome:
        runner = ToolRunner([tool], max_response_length=1000)
        (outcome,) = await runner.run([FunctionCall("search", arguments)], ToolState())
        await runner.close()
        return outcome

    return asyncio.run(run())


def tool_of(service: Service, **options: Any) -> SearchTool:
    return SearchTool({"type": "native", "retrieval_service_url": service.url, **options}, None)


def test_the_tool_shows_what_was_found(service: Service) -> None:
    outcome = call(tool_of(service, topk=2), '{"query_list": ["a", "b"]}')
    once = "Doc 1 (Title: Rome)\nRome is in Italy.\n\nDoc 2 (Title: Rome)\nRome is in Italy."
    assert json.loads(outcome.text) == {"result": f"{once}\n---\n{once}"}
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert outcome.metrics == {
        "query_count": 2, "status": "success", "total_results": 4, "api_request_error": None,
    }  # fmt: skip


def test_a_dead_service_is_told_the_model(service: Service) -> None:
    service.script = [500]
    outcome = call(tool_of(service, attempts=1), '{"query_list": ["a"]}')
    assert outcome.status == "error"
    assert outcome.text.startswith("Error when executing tool: the search engine does not work")


@pytest.mark.parametrize("arguments", ['{"query_list": []}', '{"query_list": 7}', "{}"])
def test_wrong_arguments_are_told_the_model(arguments: str, service: Service) -> None:
    outcome = call(tool_of(service), arguments)
    assert outcome.status in ("error", "malformed")
    assert "query_list" in outcome.text
    assert service.requests == []


def test_limits_are_those_of_the_config(service: Service) -> None:
    limits = tool_of(service).limits
    assert (limits.num_workers, limits.rate_limit, limits.timeout) == (120, 120, None)
    assert tool_of(service, enable_global_rate_limit=False).limits.rate_limit is None
    assert tool_of(service, rate_limit=5).limits.rate_limit == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrieval_service_url": "here"}, "retrieval_service_url='here' must be the address"),
        ({"topk": 0}, "config.topk=0"),
        ({"top_k": 3}, "config.top_k of SearchTool is unknown; did you mean 'topk'"),
        ({"timeout": None}, "config.timeout=null"),
    ],
)
def test_wrong_configs(options: dict[str, Any], message: str, service: Service) -> None:
    with pytest.raises(ConfigError, match=message):
        tool_of(service, **options)
