"""`caldera serve` in a process of its own, asked by OpenAI's client, alone and by a crowd."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pyarrow
import pyarrow.parquet
import pytest

from caldera.cli import main
from caldera.commands.generation import generate
from caldera.config import compose_config
from caldera.config.offline import GenerationConfig
from caldera.config.serve import ServeConfig
from caldera.demo import smollm2
from tests.reward_models import save_judge

MESSAGES: Any = [{"role": "user", "content": "What is the sum?"}]
CROWD = 256
LEAVING = 32
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
GOING_ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    log: Path
    url: str

    def metric(self, name: str) -> float:
        text = httpx2.get(self.url.removesuffix("/v1") + "/metrics").text
        found = re.search(rf"^caldera_{name} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])


@pytest.fixture(scope="module")
def server(lab: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        sys.executable, "-m", "caldera.cli", "serve", f"model.path={folder}", "server.port=0",
        "server.served_model_name=tiny",
    ]  # fmt: skip
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, env=lab.environment, text=True, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while not (found := re.search(r"served at (http://\S+/v1)\.", log.read_text())):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield Server(process, log, found[1])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def test_the_client_of_openai(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "caldera"
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 1}
    answer = client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=2, n=2, tools=[TOOL],
        extra_body={"return_token_ids": True, **GOING_ON},
    )  # fmt: skip
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    first = answer.choices[0]
    assert first.logprobs and first.logprobs.content
    assert [len(token.top_logprobs) for token in first.logprobs.content] == [2] * 12
    tokens = first.model_extra["token_ids"] if first.model_extra else []
    assert len(tokens) == 12
    chunks = list(
        client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body=GOING_ON
        )
    )
    told = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    plain = client.chat.completions.create(**asked, extra_body=GOING_ON)
    assert told == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage
    text = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=3, logprobs=1)
    assert text.choices[0].logprobs and text.usage and text.usage.prompt_tokens == 3
    pieces = client.completions.create(model="tiny", prompt="The", max_tokens=3, stream=True)
    assert [piece.choices[0].finish_reason for piece in pieces][-1] in ("length", "stop")


def test_errors_as_the_client_knows_them(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(
        openai.BadRequestError, match=r"a prompt of 3[0-9]{3} tokens: takes from 1 to 511"
    ):
        create(model="tiny", messages=[{"role": "user", "content": "7" * 3000}])
    with pytest.raises(openai.NotFoundError, match="takes 'tiny'"):
        create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", messages=MESSAGES, temperature=5)
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "temperature")


def test_the_line_that_is_printed_works(server: Server) -> None:
    (line,) = [line for line in server.log.read_text().splitlines() if line.startswith("curl ")]
    words = shlex.split(line)
    assert words[1] == f"{server.url}/chat/completions"
    reply = httpx2.post(
        words[1], content=words[words.index("-d") + 1],
        headers=dict([words[words.index("-H") + 1].split(": ")]), timeout=60,
    )  # fmt: skip
    assert reply.json()["choices"][0]["message"]["role"] == "assistant"


def test_a_session_by_the_client(client: openai.OpenAI, server: Server) -> None:
    messages = list(MESSAGES)
    for number in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12,
            extra_headers={"x-session-id": "mine"}, stream=False,
        )  # fmt: skip
        question = {"role": "user", "content": f"And {number}?"}
        messages += [answer.choices[0].message.model_dump(), question]
    shown = httpx2.get(server.url.removesuffix("/v1") + "/sessions/mine").json()
    (trajectory,) = shown["trajectories"]
    assert trajectory["turns"] == len(shown["requests"]) == 3
    sampled = [token for turn in shown["requests"] for token in turn["response_ids"]]
    pairs = zip(trajectory["response_ids"], trajectory["response_mask"], strict=True)
    assert [token for token, mask in pairs if mask] == sampled


def test_a_crowd(server: Server) -> None:
    """Streams of 256 clients at the same time, while others leave, and some talk nonsense."""

    async def stay(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=16, seed=seed % 8, stream=True,
            stream_options={"include_usage": True}, extra_body=GOING_ON,
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 16
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    async def leave(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=400, stream=True, extra_body=GOING_ON
        )
        async for _ in stream:
            break
        await stream.close()

    async def babble(client: openai.AsyncOpenAI) -> int:
        reply = await client._client.post(f"{server.url}/chat/completions", content=b"{" * 99)
        return int(reply.status_code)

    async def everyone() -> tuple[list[str], list[int]]:
        limits = httpx2.Limits(max_connections=None)
        http = httpx2.AsyncClient(limits=limits, timeout=120)
        async with openai.AsyncOpenAI(
            base_url=server.url, api_key="none", max_retries=0, http_client=http
        ) as client:
            staying = asyncio.gather(*(stay(client, seed) for seed in range(CROWD)))
            leaving = asyncio.gather(*(leave(client) for _ in range(LEAVING)))
            babbling = asyncio.gather(*(babble(client) for _ in range(LEAVING)))
            texts, _, statuses = await asyncio.gather(staying, leaving, babbling)
            return texts, statuses

    cancelled = server.metric("requests_cancelled_total")
    texts, statuses = asyncio.run(everyone())
    assert len(texts) == CROWD
    assert statuses == [400] * LEAVING
    for seed in range(8):  # whoever else is there, a seed gives the same
        assert len({text for number, text in enumerate(texts) if number % 8 == seed}) == 1
    deadline = time.monotonic() + 30
    while server.metric("requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("requests_running") == 0
    # Who leaves a busy machine may find that everything was written already.
    assert 0 <= server.metric("requests_cancelled_total") - cancelled <= LEAVING


def test_who_leaves_is_not_written_for(server: Server) -> None:
    cancelled, written = (
        server.metric(name) for name in ("requests_cancelled_total", "generated_tokens_total")
    )
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    for _ in range(4):
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=400, stream=True, extra_body=GOING_ON
        )
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 30
    while server.metric("requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("requests_cancelled_total") - cancelled >= 3
    assert server.metric("generated_tokens_total") - written < 4 * 400


def test_prompts_of_a_file(server: Server, folder: Path, tmp_path: Path) -> None:
    """By messages, and by tokens, for which the model's tokenizer and config are enough."""
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [MESSAGES] * 3}), tmp_path / "in.parquet")
    for who in (
        (f"rollout.url={server.url}", "model.path=tiny"),
        ("rollout.name=remote", f"rollout.remote.url={server.url}", f"model.path={bare}"),
    ):
        overrides = [
            *who, f"data.path={tmp_path}/in.parquet", f"data.output_path={tmp_path}/out.parquet",
            "data.n_samples=2", "data.batch_size=2", "rollout.top_k=-1", "rollout.prompt_length=64",
            "rollout.response_length=8", "trainer.device=cpu",
        ]  # fmt: skip
        config = compose_config(overrides, "generation", None, GenerationConfig)
        answers = pyarrow.parquet.read_table(generate(config))["responses"].to_pylist()
        assert [len(texts) for texts in answers] == [2] * 3


def test_sigterm_finishes_what_is_being_written(server: Server) -> None:
    """The last one to use this server."""

    async def ask() -> list[str]:
        async with httpx2.AsyncClient(timeout=60) as client:
            begun = asyncio.Event()

            async def listen() -> str:
                body = {
                    "messages": MESSAGES, "max_tokens": 300, "ignore_eos": True, "stream": True,
                }  # fmt: skip
                url, text = f"{server.url}/chat/completions", ""
                async with client.stream("POST", url, json=body) as reply:
                    async for line in reply.aiter_lines():
                        text = line or text
                        begun.set()
                return text

            listening = [asyncio.create_task(listen()) for _ in range(4)]
            while server.metric("requests_running") < 4:
                await asyncio.sleep(0.02)
            await begun.wait()
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*listening)

    assert asyncio.run(ask()) == ["data: [DONE]"] * 4
    assert server.process.wait(30) == 0
    told = " ".join(server.log.read_text().split())
    assert "0 cut off and told so, 0 lost" in told
    assert "Traceback" not in told


def test_mistakes_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, problem in (
        ([], "model.path is required"),
        ([f"model.path={folder}", "rollout.max_model_len=9999"], "the model was made for 512"),
        ([f"model.path={folder}", "server.tool_format=x"], "server.tool_format='x': takes one of"),
        ([f"model.path={folder}", "server.host=nowhere.invalid"], "cannot listen on nowhere"),
        (["model.path=x", "rollout.engine_python=x"], "rollout.engine_python='x': takes"),
        (
            ["model.path=x", "rollout.name=remote"],
            "rollout.remote.url=null with rollout.name=remot",
        ),
        (["model.path=x", "rollout.top_k=5"], "rollout.top_k"),
    ):
        assert main(["serve", "server.device=cpu", *overrides]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.skipif(
    not smollm2.default_folder().is_dir()
    and not all(map(importlib.util.find_spec, [smollm2.PACKAGE, "gguf"])),
    reason=f"SmolLM2 is not installed: {smollm2.INSTALL}",
)
def test_a_real_model_in_a_session() -> None:
    """What it says is read again in its own tokens, though its text would give others."""
    from caldera.commands.serve import start

    overrides = [f"model.path={smollm2.materialise()}", "server.port=0", "server.device=cpu"]
    config = compose_config(overrides, "serve", None, ServeConfig)
    serving = start(config)
    server = serving.server
    try:
        client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120)
        messages: list[Any] = [{"role": "user", "content": "Tell me a story of a fox."}]
        for question in ("Go on.", "How does it end?"):
            answer = client.chat.completions.create(
                model=str(config.model.path), messages=messages, max_tokens=24, temperature=2.0,
                seed=2, extra_body={"session_id": "fox"},  # a seed whose text gives other tokens
            )  # fmt: skip
            said = answer.choices[0].message.model_dump()
            messages += [said, {"role": "user", "content": question}]
        (trajectory,) = server.trajectories("fox")
        first, second = server.recorder.turns("fox") or []
    finally:
        account = serving.close(seconds=0)
    assert account.lost == 0
    assert trajectory.turns == 2
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    tokenizer: Any = server._model.tokenizer
    text = tokenizer.decode(first.response_ids, skip_special_tokens=True)
    assert tokenizer.encode(text) != first.response_ids
    between = second.prompt_ids[len(first.prompt_ids) + len(first.response_ids) :]
    assert tokenizer.decode(between).removeprefix("<|im_end|>") == (
        "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
