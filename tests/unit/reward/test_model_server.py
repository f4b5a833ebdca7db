"""The client of reward model servers, against real HTTP servers, good and bad."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from caldera.config import PPOTrainerConfig
from caldera.config.reward import RewardModelConfig, RewardModelModelConfig, RewardRolloutConfig
from caldera.errors import DataError, RewardError
from caldera.protocol import DataProto
from caldera.reward import compute_reward, load_reward_manager, model_server, streams
from caldera.reward.model_server import (
    RewardModelClient,
    RouterUrl,
    ServedScore,
    router_address,
    served_score,
    server_arguments,
)
from caldera.reward.scoring import ThreadScoring
from tests.reward_models import save_reward_model

ASKED = [{"role": "user", "content": "What is the sum?"}]
TEXT = "<|user|>\nWhat is the sum?</s>\n<|assistant|>\nSeven.</s>\n"
Answer = tuple[int, bytes]


class Server(ThreadingHTTPServer):
    """Answers what it is told to, in this order; and the last of it again and again."""

    answers: list[Answer]
    requests: list[tuple[str, dict[str, Any]]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body)))
        answers = self.server.answers
        status, content = answers.pop(0) if len(answers) > 1 else answers[0]
        if status == 0:  # hangs up
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "FIRST_PAUSE_SECONDS", 0.0001)
    monkeypatch.setattr(model_server, "LONGEST_PAUSE_SECONDS", 0.001)


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def score(server: Server, folder: Path) -> Callable[..., float]:
    def ask(name: str, *answers: Answer, max_length: int | None = None) -> float:
        server.answers = list(answers)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        client = RewardModelClient(url_of(server), name, "judge", tokenizer, max_length)
        return asyncio.run(client.score(ASKED, "Seven."))

    return ask


def classified(*scores: float) -> Answer:
    data = [{"probs": [0.5, score]} for score in scores]
    return 200, json.dumps({"data": data}).encode()


def test_the_protocols(score: Callable[..., float], server: Server, folder: Path) -> None:
    assert score("vllm", classified(1.0, -2.5)) == -2.5
    embedded = json.dumps({"data": [{"embedding": [0.25, 7]}]}).encode()
    assert score("sglang", (200, embedded)) == 7.0
    assert score("native", classified(3.0), max_length=5) == 3.0
    no_activation = {"activation": False, "use_activation": False}
    own = AutoTokenizer.from_pretrained(folder)
    tokens = own.encode("<s>" + TEXT, add_special_tokens=False)
    assert server.requests == [
        # The token at the beginning is left to the server.
        ("/classify", {"model": "judge", "input": TEXT, **no_activation}),
        ("/v1/embeddings", {"model": "judge", "input": TEXT}),
        ("/classify", {"model": "judge", "input": tokens[:5]}),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        (500, b"no memory"),
        (503, b"{}"),
        (429, b"later"),
        (0, b""),
        (200, b"<html>"),
        (200, b"\xff\xfe"),
        (200, b"[]"),
        (200, b"[" * 100_000),
        (200, b'{"data": []}'),
        (200, b'{"data": [{"probs": []}]}'),
        (200, b'{"data": [{"probs": ["high"]}]}'),
        (200, b'{"data": [{"probs": [NaN]}]}'),
        (200, b'{"data": [{"probs": [true]}]}'),
    ],
)
def test_a_bad_answer_is_asked_for_again(
    score: Callable[..., float], server: Server, bad: Answer
) -> None:
    assert score("vllm", *[bad] * 15, classified(0.5)) == 0.5
    assert len(server.requests) == 16
    with pytest.raises(RewardError, match=rf"^no score from {url_of(server)}/classify: "):
        score("vllm", bad)
    assert len(server.requests) == 32


def test_a_mistake_of_ours_is_not_repeated(score: Callable[..., float], server: Server) -> None:
    with pytest.raises(RewardError, match="a sequence of 9999 tokens"):
        score("native", (400, b'{"error": {"message": "a sequence of 9999 tokens"}}'))
    assert len(server.requests) == 1


def test_a_server_that_is_gone(folder: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        client = RewardModelClient(url, "vllm", "judge", AutoTokenizer.from_pretrained(folder))
        with pytest.raises(RewardError, match="refused"):
            asyncio.run(client.score(ASKED, "Seven."))


def test_only_the_runs_own_router_is_beyond_no_proxy(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "")
        server.answers = [classified(4.0)]
        config = settings(folder, RouterUrl(url_of(server)))
        ours = pickle.loads(pickle.dumps(ServedScore(config))).client
        assert asyncio.run(ours.score(ASKED, "Seven.")) == 4.0
        theirs = ServedScore(settings(folder, url_of(server))).client
        with pytest.raises(RewardError, match="refused"):
            asyncio.run(theirs.score(ASKED, "Seven."))


def test_a_request_under_way_does_not_keep_the_process_alive(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = RewardModelClient(url, "vllm", "judge", AutoTokenizer.from_pretrained(folder))
        before = set(threading.enumerate())
        asked = ThreadScoring(client.score, None).submit(
            {"messages": ASKED, "answer": "Seven."}, "row 0"
        )
        connection, _ = silent.accept()
        started = set(threading.enumerate()) - before
        assert started and all(thread.daemon for thread in started)
        asked.cancel()
        connection.close()


def settings(folder: Path, *urls: str) -> RewardModelConfig:
    return RewardModelConfig(
        enable=True,
        model=RewardModelModelConfig(path=str(folder)),
        rollout=RewardRolloutConfig(name="vllm", url=list(urls)),
    )


def test_the_score_function_of_a_config(server: Server, folder: Path) -> None:
    server.answers = [classified(4.0)]
    config = settings(folder, f"{url_of(server)}/")
    compute_score = pickle.loads(pickle.dumps(ServedScore(config)))
    call = compute_score("any", "Seven.", None, {"index": 1}, raw_prompt=ASKED, further=3)
    assert asyncio.run(call) == 4.0
    assert server.requests[0][1]["model"] == str(folder)


def test_a_tokenizer_without_a_template_is_found_at_once(tmp_path: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"^reward_model\.model\.path=.*no chat template"):
        served_score(settings(tmp_path, "http://a:1"))


def test_the_address_that_score_functions_get(folder: Path) -> None:
    for url, address in {
        "http://host:8000": "host:8000",
        "http://host:8000/": "host:8000",
        "http://host:8000/judge": "http://host:8000/judge",
        "https://host": "https://host",
    }.items():
        assert router_address(settings(folder, url)) == address


@pytest.mark.parametrize(
    ("name", "own_pool", "streams_then"),
    [(None, False, False), ("native", False, False), ("native", True, True), ("vllm", False, True)],
)
def test_which_models_score_while_others_sample(
    folder: Path, name: str | None, own_pool: bool, streams_then: bool
) -> None:
    config = PPOTrainerConfig()
    config.reward_manager.name = "naive"
    config.reward_model = settings(folder, "http://a:1")
    config.reward_model.rollout.name = name
    config.reward_model.enable_resource_pool = own_pool
    config.reward.num_workers = None
    manager = load_reward_manager(config, AutoTokenizer.from_pretrained(folder), num_examine=0)
    assert streams(config, manager) is streams_then
    by_model = isinstance(manager.compute_score, ServedScore)  # type: ignore[attr-defined]
    assert by_model is (name is not None)


def test_what_functions_of_the_users_own_may_ask_for(folder: Path) -> None:
    offered = server_arguments(settings(folder, "http://a:1"))
    assert offered["reward_router_address"]() == "a:1"
    assert offered["reward_model_tokenizer"]().bos_token == "<s>"
    without = server_arguments(RewardModelConfig(enable=True))
    assert {name: make() for name, make in without.items()} == dict.fromkeys(offered)


def test_functions_get_what_they_have_a_name_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(
        "def plain(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
        "def told(solution_str, reward_router_address, raw_prompt, **others):\n"
        "    assert raw_prompt == [{'role': 'user', 'content': 'What?'}]\n"
        "    return {'score': 1.0, 'at': reward_router_address, 'others': sorted(others)}\n"
    )
    data = DataProto.from_dict(
        {
            "prompts": torch.tensor([[7, 8]]),
            "responses": torch.tensor([[9, 9]]),
            "attention_mask": torch.ones(1, 4, dtype=torch.long),
        },
        {
            "data_source": ["x"],
            "reward_model": [{"ground_truth": 1}],
            "raw_prompt": [[{"role": "user", "content": "What?"}]],
        },
    )
    config = PPOTrainerConfig()
    config.reward_manager.name = "naive"
    config.reward_model = settings(folder, "http://a:1")
    config.reward.num_workers = None
    config.custom_reward_function.path = str(tmp_path / "judges.py")
    for name, score in (("plain", 0), ("told", 1)):
        # The tokenizer is read for those that ask for it alone.
        config.reward_model.model.path = "nowhere" if name == "plain" else str(folder)
        config.custom_reward_function.name = name
        manager = load_reward_manager(config, AutoTokenizer.from_pretrained(folder), num_examine=0)
        rewards, extras = compute_reward(data, manager)
        assert "reward_state" not in extras, extras
        assert rewards.tolist() == [[0, score]]
    assert extras["at"] == ["a:1"]
    assert extras["others"] == [
        ["data_source", "extra_info", "ground_truth", "reward_model_tokenizer"]
    ]
