"""A reward model behind HTTP: scores of texts or tokens, in the protocols of vLLM and SGLang.

    POST /classify       {"input": ...} -> {"data": [{"probs": [score], ...}, ...], ...}
    POST /v1/embeddings  {"input": ...} -> {"data": [{"embedding": [score], ...}, ...], ...}
    GET  /health         200; 503 while the model sleeps

`input` is a text, a list of texts, the tokens of one sequence, or a list of such. A text gets the
special tokens that the model's tokenizer adds. Scores are the model's own, without an activation.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from caldera.errors import CalderaError, DataError
from caldera.web import HttpServer, Reply, Request, error_reply, json_reply, read_object

ScoreTokens = Callable[[list[list[int]]], Sequence[float]]
"""Sequences of tokens -> a score of each."""
PATHS = ("/classify", "/v1/embeddings")


class Asleep(CalderaError):
    """The model is not on its device."""


@dataclass(frozen=True)
class ServedModel:
    """What a server must know of its model."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    """Tokens from here on do not exist."""
    max_length: int | None
    """Tokens of a sequence at most; None: any number."""


class RewardServer:
    """Serves a model that is awake; while it sleeps, requests are turned away."""

    def __init__(
        self, score: ScoreTokens, model: ServedModel, max_tokens: int, max_sequences: int, host: str
    ) -> None:
        self._score = score
        self._model = model
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._awake = True
        self._turn = threading.Lock()
        # What follows belongs to the server's event loop.
        self._waiting: deque[tuple[list[int], asyncio.Future[float]]] = deque()
        self._computing: asyncio.Task[None] | None = None
        self._model_thread = ThreadPoolExecutor(1, "reward-model")
        self._http = HttpServer(self._handle, host)
        self.address = self._http.address

    def wake(self) -> None:
        self._awake = True

    def sleep(self) -> None:
        """When this returns the model is not in use."""
        self._awake = False
        with self._turn:  # what computes now ends first
            return

    def close(self) -> None:
        self._http.close()
        self._model_thread.shutdown()

    # ---- Dynamic batching: whatever waits while the model computes is computed next, together

    def _submit(self, tokens: list[int]) -> asyncio.Future[float]:
        score = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, score))
        if self._computing is None:
            self._computing = asyncio.create_task(self._compute())
        return score

    async def _compute(self) -> None:
        """Score what waits, in the order in which it came; what a batch raises, all of it gets."""
        loop = asyncio.get_running_loop()
        while batch := self._first():
            tokens = [tokens for tokens, _ in batch]
            computed = loop.run_in_executor(self._model_thread, self._score_awake, tokens)
            (outcome,) = await asyncio.gather(computed, return_exceptions=True)
            for place, (_, score) in enumerate(batch):
                if score.cancelled():
                    continue
                if isinstance(outcome, BaseException):
                    score.set_exception(outcome)
                else:
                    score.set_result(float(outcome[place]))
        self._computing = None

    def _first(self) -> list[tuple[list[int], asyncio.Future[float]]]:
        """As many as make a batch, of those whose callers have not gone away: at most `max_tokens`
        tokens, unless one sequence alone has more, and at most `max_sequences` sequences."""
        taken: list[tuple[list[int], asyncio.Future[float]]] = []
        tokens = 0
        while self._waiting and len(taken) < self._max_sequences:
            if self._waiting[0][1].cancelled():
                self._waiting.popleft()
                continue
            tokens += len(self._waiting[0][0])
            if taken and tokens > self._max_tokens:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _score_awake(self, sequences: list[list[int]]) -> Sequence[float]:
        with self._turn:
            if not self._awake:
                raise Asleep("the reward model sleeps")
            return self._score(sequences)

    async def _handle(self, request: Request) -> Reply:
        if request.path == "/health":
            return json_reply({}) if self._awake else error_reply(503, "the reward model sleeps")
        if request.path not in PATHS or request.method != "POST":
            return error_reply(404, f"{request.method} {request.path}: POST {' or '.join(PATHS)}")
        try:
            sequences = _read(request.body, self._model)
        except DataError as error:
            return error_reply(400, str(error))
        pending = [self._submit(tokens) for tokens in sequences]
        scores: list[float] = []
        for outcome in await asyncio.gather(*pending, return_exceptions=True):
            if isinstance(outcome, BaseException):
                status = 503 if isinstance(outcome, Asleep) else 500
                return error_reply(status, f"{type(outcome).__name__}: {outcome}")
            scores.append(outcome)
        return json_reply(self._answer(request.path, scores, sum(map(len, sequences))))

    def _answer(self, path: str, scores: list[float], tokens: int) -> dict[str, Any]:
        data: list[dict[str, Any]]
        if path == "/classify":
            data = [
                {"index": i, "label": "LABEL_0", "probs": [score], "num_classes": 1}
                for i, score in enumerate(scores)
            ]
        else:
            data = [
                {"index": i, "object": "embedding", "embedding": [score]}
                for i, score in enumerate(scores)
            ]
        return {
            "id": f"{path.rpartition('/')[2]}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        }


def _read(body: bytes, model: ServedModel) -> list[list[int]]:
    """The sequences of a request; raises DataError where it cannot be answered."""
    request = read_object(body)
    for key in ("activation", "use_activation"):
        if request.get(key):
            raise DataError(f"{key}={request[key]!r:.100}: scores have no activation; takes false")
    if request.get("encoding_format", "float") != "float":
        raise DataError(f"encoding_format={request['encoding_format']!r:.100}: takes float")
    sequences = [_tokens(item, model) for item in _items(request.get("input"))]
    for tokens in sequences:
        if not tokens or (model.max_length is not None and len(tokens) > model.max_length):
            most = "" if model.max_length is None else f" to {model.max_length}"
            raise DataError(f"a sequence of {len(tokens)} tokens: takes from 1{most}")
    return sequences


def _items(given: Any) -> list[Any]:
    """The sequences in `input`, each a text or a list of tokens."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        return [given] if all(_is_token(item) for item in given) else given
    raise DataError("input must be a text, a list of texts, tokens or a list of such")


def _tokens(item: Any, model: ServedModel) -> list[int]:
    if isinstance(item, str):
        return list(model.tokenizer.encode(item))
    if isinstance(item, list) and all(_is_token(token) for token in item):
        for token in item:
            if not 0 <= token < model.vocabulary:
                raise DataError(f"token {token}: the model knows 0 to {model.vocabulary - 1}")
        return item
    raise DataError("input must be a text, a list of texts, tokens or a list of such")


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
