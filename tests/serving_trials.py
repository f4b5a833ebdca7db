"""What must hold of `caldera serve` on vLLM and on SGLang alike. One engine serves all trials."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from caldera.commands.serve import Serving, start
from caldera.config import compose_config
from caldera.config.serve import ServeConfig
from caldera.demo import smollm2
from caldera.rollout.engines.rollout import EngineRollout
from tests.engine_trials import python_of

MODEL = "smol"
STREAMS = 16
TOKENS = 48
QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea."]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLS: Any = [
    *2 * [{"role": "user", "content": "Call add."}, {"role": "assistant", "content": CALL}],
    {"role": "user", "content": "Call add."},
]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
GREEDY: Any = {"model": MODEL, "temperature": 0}
WITH_IDS: Any = {"extra_body": {"return_token_ids": True}}


def asked(question: str) -> Any:
    return [{"role": "user", "content": question}]


class ServingTrials:
    """To be subclassed, with the engine's name."""

    name: str

    @pytest.fixture(scope="class")
    @classmethod
    def serving(cls) -> Iterator[Serving]:
        config = compose_config(cls.overrides(smollm2.materialise()), "serve", None, ServeConfig)
        serving = start(config)
        yield serving
        assert isinstance(serving.rollout, EngineRollout)
        pids = serving.rollout.pids
        assert serving.close(seconds=0).lost == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    @classmethod
    def overrides(cls, model: Path) -> list[str]:
        return [
            f"model.path={model}", f"rollout.name={cls.name}", "rollout.max_model_len=256",
            f"rollout.engine_python={python_of(cls.name)}", f"rollout.max_num_seqs={STREAMS}",
            "server.port=0", "server.device=cpu", f"server.served_model_name={MODEL}",
        ]  # fmt: skip

    @pytest.fixture
    def client(self, serving: Serving) -> openai.OpenAI:
        return openai.OpenAI(base_url=serving.server.url, api_key="none", max_retries=0)

    def test_whole_and_streamed_answers(self, client: openai.OpenAI) -> None:
        plain: Any = GREEDY | {"messages": asked(QUESTIONS[0]), "max_tokens": 24}
        whole = client.chat.completions.create(**plain, logprobs=True, top_logprobs=2, **WITH_IDS)
        (choice,) = whole.choices
        assert choice.message.content == "The capital of France is Paris."
        assert choice.finish_reason == "stop" and choice.logprobs and choice.logprobs.content
        likely = [token.top_logprobs for token in choice.logprobs.content]
        assert [len(pair) for pair in likely] == [2] * len(likely)
        for token, (first, second) in zip(choice.logprobs.content, likely, strict=True):
            assert (first.token, first.logprob) == (token.token, pytest.approx(token.logprob))
            assert second.logprob < first.logprob < 0
        assert choice.model_extra and whole.usage
        tokens = choice.model_extra["token_ids"]
        assert len(tokens) == whole.usage.completion_tokens == len(likely)
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(**plain, **usage, **WITH_IDS)
        pieces = [chunk.choices[0] for chunk in chunks]
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        told = [
            token for piece in pieces for token in (piece.model_extra or {}).get("token_ids", [])
        ]
        assert told == tokens and len(pieces) > len(tokens)
        assert last.usage == whole.usage

    def test_calls_of_tools(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            **GREEDY, messages=CALLS, tools=[TOOL], max_tokens=40
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')

    def test_text_and_what_cannot_be(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model=MODEL, prompt="One, two, three, four,", max_tokens=16, temperature=0, n=2,
            stop=" seven", logprobs=1, **WITH_IDS,
        )  # fmt: skip
        for choice in answer.choices:
            assert (choice.text, choice.finish_reason) == (" five, six,", "stop")
            assert choice.logprobs and choice.logprobs.token_logprobs and choice.model_extra
            assert len(choice.logprobs.token_logprobs) == len(choice.model_extra["token_ids"])
        with pytest.raises(openai.BadRequestError, match="takes from 1 to 255"):
            client.completions.create(model=MODEL, prompt=[5] * 256)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x", logit_bias={"5": 1})
        assert caught.value.param == "logit_bias"

    def test_a_killed_engine_loses_no_stream(self, serving: Serving) -> None:
        rollout = serving.rollout
        assert isinstance(rollout, EngineRollout)
        going_on: Any = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}

        async def whole(client: openai.AsyncOpenAI, question: str) -> str:
            answer = await client.chat.completions.create(
                **GREEDY, **going_on, messages=asked(question)
            )
            return answer.choices[0].message.content or ""

        async def listen(client: openai.AsyncOpenAI, number: int, begun: list[int]) -> str:
            stream = await client.chat.completions.create(
                **GREEDY, **going_on, messages=asked(QUESTIONS[number % 2]), stream=True
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                begun[number] += bool(text)
            return text

        async def everyone() -> tuple[list[str], list[str]]:
            begun = [0] * STREAMS
            async with openai.AsyncOpenAI(
                base_url=serving.server.url, api_key="none", max_retries=0
            ) as client:
                expected = [await whole(client, question) for question in QUESTIONS]
                listening = [
                    asyncio.create_task(listen(client, number, begun)) for number in range(STREAMS)
                ]
                while not all(begun):
                    for task in listening:
                        if task.done():  # it has failed, and would never begin
                            task.result()
                    await asyncio.sleep(0.01)
                assert max(begun) < TOKENS, "they are in their midst"
                os.kill(rollout.pids[0], signal.SIGKILL)
                return expected, await asyncio.gather(*listening)

        expected, texts = asyncio.run(everyone())
        assert texts == expected * (STREAMS // 2)
        shown = httpx2.get(f"http://{serving.server.address}/metrics").text.splitlines()
        assert {"caldera_engine_restarts_total 1", "caldera_requests_lost_total 0"} <= set(shown)
        assert "caldera_requests_running 0" in shown
