"""Training with rewards from servers: the run's own reward model, or one that is elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

STEPS = "trainer.total_training_steps=2"
NATIVE = "reward_model.rollout.name=native"
JUDGE = """
import asyncio, json, urllib.request

def ask(address, question, answer):
    message = {"role": "user", "content": f"Is {answer} right for {question}?"}
    body = json.dumps({"model": "judge", "messages": [message]}).encode()
    with urllib.request.urlopen(f"http://{address}/v1/chat/completions", body) as response:
        return float(json.load(response)["choices"][0]["message"]["content"])

async def compute_score(
    data_source, solution_str, ground_truth, extra_info=None,
    reward_router_address=None, reward_model_tokenizer=None, raw_prompt=None,
):
    question = raw_prompt[-1]["content"]
    assert reward_model_tokenizer.eos_token
    return await asyncio.to_thread(ask, reward_router_address, question, solution_str)
"""

OWN_JUDGE = """
import asyncio, json, urllib.request

def ask(address, question):
    message = {"role": "user", "content": question}
    body = {"messages": [message], "temperature": 0.7, "max_tokens": 4}
    url = f"http://{address}/v1/chat/completions"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
        return json.load(response)["choices"][0]["message"]["content"]

async def compute_score(
    data_source, solution_str, ground_truth, extra_info=None,
    reward_router_address=None, raw_prompt=None,
):
    question = raw_prompt[-1]["content"]
    verdict = await asyncio.to_thread(ask, reward_router_address, question)
    return {"score": float(verdict == solution_str), "acc": float(verdict == ground_truth)}
"""


class Elsewhere(ThreadingHTTPServer):
    """A chat model and a classifier: both like long answers; the first five requests fail."""

    paths: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Elsewhere

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        fails = self.path == "/classify" and len(self.server.paths) <= 5
        body = json.dumps(self.answer(request)).encode()
        self.send_response(500 if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/classify":
            return {"data": [{"probs": [float(len(request["input"]))]}]}
        verdict = str(len(request["messages"][-1]["content"]) % 3)
        return {"choices": [{"message": {"role": "assistant", "content": verdict}}]}

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere(("127.0.0.1", 0), Handler) as server:
        server.paths = []
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: Elsewhere) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_the_runs_own_model_behind_servers(
    lab: Lab, tmp_path: Path, reward_model: tuple[str, ...]
) -> None:
    """On one rank it sleeps while others compute; with a rank of its own it scores meanwhile."""
    served = (*reward_model, NATIVE, STEPS)
    alone = lab.train(tmp_path / "one", *served, "trainer.test_freq=2")
    assert alone[0]["reward/failed"] == 0
    assert alone[0]["critic/score/max"] > alone[0]["critic/score/min"]
    assert [key for key in alone[-1] if key.startswith("val-core/")]
    both = lab.train(tmp_path / "two", *served, "trainer.n_gpus_per_node=2")
    lab.assert_same(both, alone)
    apart = lab.train(
        tmp_path / "pool", *served, "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=2", "reward_model.nnodes=1",
    )  # fmt: skip
    lab.assert_same(apart, alone)


def test_the_runs_own_judge(lab: Lab, tmp_path: Path) -> None:
    """A language model that sleeps while others compute, or has ranks of its own."""
    (tmp_path / "judge.py").write_text(OWN_JUDGE)
    served = (
        "reward_model.enable=True", f"reward_model.model.path={lab.model}", NATIVE, STEPS,
        f"custom_reward_function.path={tmp_path / 'judge.py'}", "reward.num_workers=8",
        "reward_model.rollout.prompt_length=16", "reward_model.rollout.response_length=4",
        *lab.descent,
    )  # fmt: skip
    alone = lab.train(tmp_path / "one", *served)
    assert [row["reward/failed"] for row in alone] == [0, 0]
    assert alone[0]["critic/score/max"] > alone[0]["critic/score/min"]
    apart = lab.train(
        tmp_path / "pool", *served, "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=2", "reward_model.nnodes=1",
    )  # fmt: skip
    assert [row["reward/failed"] for row in apart] == [0, 0]
    lab.assert_same(apart, alone)


def test_a_judge_whom_nobody_asks(lab: Lab, tmp_path: Path) -> None:
    model = ("reward_model.enable=True", f"reward_model.model.path={lab.model}", NATIVE)
    ended = lab.run(lab.overrides(tmp_path, *model))
    assert ended.returncode == 2
    assert "custom_reward_function.path=null: " in ended.stderr


def test_a_classifier_elsewhere(
    lab: Lab, tmp_path: Path, reward_model: tuple[str, ...], elsewhere: Elsewhere
) -> None:
    server = (NATIVE.replace("native", "vllm"), f"reward_model.rollout.url={url_of(elsewhere)}")
    rows = lab.train(tmp_path, *reward_model, *server, STEPS, "reward_model.reward_manager=dapo")
    assert [row["reward/failed"] for row in rows] == [0, 0]
    assert rows[0]["critic/score/max"] > rows[0]["critic/score/min"] > 0
    assert set(elsewhere.paths) == {"/classify"}
    assert len(elsewhere.paths) == 5 + 2 * 25 * 16


def test_a_chat_model_elsewhere(
    lab: Lab, tmp_path: Path, reward_model: tuple[str, ...], elsewhere: Elsewhere
) -> None:
    """Two addresses, which a router joins; a function of the user's own asks."""
    (tmp_path / "judge.py").write_text(JUDGE)
    rows = lab.train(
        tmp_path / "run", *reward_model, STEPS, "reward_model.rollout.name=sglang",
        f"reward_model.rollout.url=[{url_of(elsewhere)},{url_of(elsewhere)}]",
        f"custom_reward_function.path={tmp_path / 'judge.py'}",
    )  # fmt: skip
    assert [row["reward/failed"] for row in rows] == [0, 0]
    assert set(elsewhere.paths) == {"/v1/chat/completions"}
    assert len(elsewhere.paths) == 2 * 25 * 16
    assert rows[0]["critic/score/max"] in (1, 2)


def test_a_server_that_was_never_there_ends_a_run(
    lab: Lab, tmp_path: Path, reward_model: tuple[str, ...]
) -> None:
    arguments = lab.overrides(
        tmp_path, *reward_model, "trainer.total_training_steps=1", "reward.timeout=3",
        "reward_model.rollout.name=vllm", "reward_model.rollout.url=http://127.0.0.1:9",
        "data.train_batch_size=5", "actor_rollout_ref.rollout.n=2",
    )  # fmt: skip
    done = lab.run(arguments)
    assert done.returncode == 2
    assert "caldera: error: none of the first 10 responses could be scored" in done.stderr
    assert "the score function took longer than 3 s" in done.stderr
