"""A reward model behind HTTP: the protocols, batches of many callers, and what it turns away."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from caldera.config import PPOTrainerConfig
from caldera.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroup
from caldera.workers import RewardModelWorker
from caldera.workers.reward_server import RewardServer, ServedModel
from tests.reward_models import Messages, plain_scores, save_reward_model

CHAT: Messages = [
    {"role": "user", "content": "What is the sum?"},
    {"role": "assistant", "content": "The sum is seven."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture
def group(load: Callable[..., PPOTrainerConfig], folder: Path) -> Iterator[WorkerGroup]:
    config = load(
        "reward_model.enable=True", f"reward_model.model.path={folder}",
        "reward_model.rollout.name=native", "reward_model.rollout.max_model_len=64",
    ).reward_model  # fmt: skip
    group = LocalWorkerGroup(ResourcePool((1,)), lambda: RewardModelWorker(config, "cpu"))
    group.init_model()
    yield group
    group.stop_serving()


@pytest.fixture
def address(group: WorkerGroup) -> str:
    (address,) = group.serve()
    group.wake()
    return str(address)


def ask(address: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    """(status, answer) to a POST of the body, or to a GET without one."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_scores_of_texts_and_of_tokens(address: str, folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(folder)
    (expected,) = plain_scores(folder, [CHAT])
    text: Any = own.apply_chat_template(CHAT, tokenize=False)
    tokens = own.encode(text, add_special_tokens=False)
    bare = text.removeprefix("<s>")  # the tokenizer puts it back
    for given, count in ((bare, 1), ([bare] * 2, 2), (tokens, 1), ([tokens] * 3, 3)):
        status, answer = ask(address, "/classify", {"model": "any", "input": given})
        assert status == 200
        scores = [score for item in answer["data"] for score in item["probs"]]
        assert scores == pytest.approx([expected] * count, abs=1e-5)
        assert [item["index"] for item in answer["data"]] == list(range(count))
        assert answer["usage"]["prompt_tokens"] == len(tokens) * count
    status, answer = ask(address, "/v1/embeddings", {"input": [bare]})
    assert answer["data"][-1]["embedding"][-1] == pytest.approx(expected, abs=1e-5)
    assert ask(address, "/health") == (200, {})
    assert address.startswith("127.0.0.1:"), "without Ray it is for this machine alone"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        ({}, "input must be"),
        ({"input": []}, "input must be"),
        ({"input": [1, "x"]}, "input must be"),
        ({"input": [[1], [True]]}, "input must be"),
        ({"input": [1, 5000]}, "token 5000: the model knows 0 to "),
        ({"input": [[1], []]}, "a sequence of 0 tokens"),
        ({"input": [3] * 65}, "a sequence of 65 tokens: takes from 1 to 64"),
        ({"input": "x", "use_activation": True}, "use_activation=True"),
        ({"input": "x", "encoding_format": "base64"}, "encoding_format"),
    ],
)
def test_what_cannot_be_answered_is_told(address: str, body: Any, problem: str) -> None:
    status, answer = ask(address, "/classify", body)
    assert (status, answer["error"]["code"]) == (400, 400)
    assert problem in answer["error"]["message"]


def test_other_paths_are_not_found(address: str) -> None:
    assert ask(address, "/v1/chat/completions", {})[0] == 404
    assert ask(address, "/classify")[0] == 404


def test_a_model_that_sleeps_turns_requests_away(group: WorkerGroup) -> None:
    (address,) = group.serve()  # it shares its device: it sleeps until it is woken
    request = {"input": [3, 4]}
    assert ask(address, "/health")[0] == 503
    assert ask(address, "/classify", request)[0] == 503
    group.wake()
    assert (ask(address, "/health")[0], ask(address, "/classify", request)[0]) == (200, 200)
    group.sleep()
    assert ask(address, "/classify", request)[0] == 503


class Judge:
    """The sum of the tokens; waits until it is told to go on, and raises on token 13."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.batches: list[list[list[int]]] = []

    def __call__(self, sequences: list[list[int]]) -> list[float]:
        self.batches.append(sequences)
        self.started.release()
        self.go_on.acquire()
        if any(13 in tokens for tokens in sequences):
            raise RuntimeError("no memory")
        return [float(sum(tokens)) for tokens in sequences]


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def slow(judge: Judge, folder: Path) -> Iterator[RewardServer]:
    model = ServedModel("judge", AutoTokenizer.from_pretrained(folder), 300, None)
    server = RewardServer(judge, model, max_tokens=10, max_sequences=3, host="127.0.0.1")
    yield server
    judge.go_on.release(100)
    server.close()


def test_what_waits_is_scored_together(judge: Judge, slow: RewardServer) -> None:
    given = [[1], [2, 2], [3, 3], [4] * 4, [5] * 11, [6], [7] * 4, [8]]
    with ThreadPoolExecutor(len(given)) as threads:
        answers = [threads.submit(ask, slow.address, "/classify", {"input": given[0]})]
        judge.started.acquire()  # the model computes; the others come meanwhile
        for number, tokens in enumerate(given[1:]):
            answers.append(threads.submit(ask, slow.address, "/classify", {"input": tokens}))
            while len(slow._waiting) <= number:
                pass
        judge.go_on.release(100)
        scores = [answer.result()[1]["data"][0]["probs"][0] for answer in answers]
    assert scores == [sum(tokens) for tokens in given]
    # At most ten tokens and three sequences a batch; a longer sequence is alone.
    assert judge.batches == [given[:1], given[1:4], given[4:5], given[5:8]]


def test_an_error_of_the_model_is_an_answer(judge: Judge, slow: RewardServer) -> None:
    judge.go_on.release(100)
    status, answer = ask(slow.address, "/classify", {"input": [13]})
    assert (status, answer["error"]["message"]) == (500, "RuntimeError: no memory")
    assert ask(slow.address, "/classify", {"input": [12]})[0] == 200  # and it goes on


def test_sleep_waits_for_what_is_being_scored(judge: Judge, slow: RewardServer) -> None:
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(ask, slow.address, "/classify", {"input": [1]})
        judge.started.acquire()
        second = threads.submit(ask, slow.address, "/classify", {"input": [2]})
        while not slow._waiting:
            pass
        asleep = threads.submit(slow.sleep)
        while slow._awake:
            pass
        assert not asleep.done()
        judge.go_on.release(100)
        asleep.result()
        assert (first.result()[0], second.result()[0]) == (200, 503)
    assert judge.batches == [[[1]]]
