"""`rollout.name=remote`: a remote server samples, from tokens to tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from caldera.config.samplers import SAMPLERS
from caldera.errors import CalderaError, ConfigError, RolloutError
from caldera.http_client import AsyncJsonClient, Refused, Retries, Unavailable
from caldera.rollout.base import (
    ROLLOUTS,
    Completion,
    OnFinished,
    OnToken,
    Request,
    RolloutPart,
    StepwiseRollout,
)
from caldera.storage import shown_url

if TYPE_CHECKING:
    from caldera.config import RolloutConfig


URL = "rollout.remote.url"
FAILURE = "no answer in {attempts} attempts: {error}"
SENT = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
"""Parameters that go over as they are."""


@ROLLOUTS.register("remote")
class RemoteRollout(StepwiseRollout):
    """Asks an OpenAI-compatible server at /v1/completions, many requests at a time.

    It cannot be given weights. A completion is reported when it has ended, all tokens at once. What
    its log-probs mean is the server's to say.
    """

    traits = SAMPLERS["remote"]

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, module, device)
        if config.remote.url is None:
            raise ConfigError(f"{URL}=null: rollout.name=remote needs the address of a server")
        self._loop = asyncio.new_event_loop()
        self._client = ServerClient(config.remote.url, URL, config.max_num_seqs)
        self._gate = asyncio.Semaphore(config.max_num_seqs)
        self._model = config.remote.model
        self._calls: dict[int, tuple[asyncio.Task[Completion], OnToken | None, OnFinished | None]]
        self._calls = {}

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise RolloutError(f"{self._client.told}: a remote server does not take weights")

    def wake_up(self, part: RolloutPart | None = None) -> None:
        """Nothing to do: the memory is the server's."""

    def sleep(self) -> None:
        """Nothing to do, either."""

    def close(self) -> None:
        """Give up what is in flight, and the connections."""
        for number in list(self._calls):
            self.abort(number)
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def add(
        self,
        request: Request,
        on_token: OnToken | None = None,
        on_finished: OnFinished | None = None,
    ) -> int:
        self.check([request])
        number = next(self._numbers)
        self._calls[number] = (self._loop.create_task(self._ask(request)), on_token, on_finished)
        return number

    @contextmanager
    def stepping(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # whatever it was, nobody waits for these any more
            for number in list(self._calls):
                self.abort(number)
            self._failures.clear()
            raise

    def step(self) -> None:
        """Wait for the next response, or for a moment, so that other requests may be sent."""
        tasks = [task for task, _, _ in self._calls.values()]
        self._loop.run_until_complete(
            asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        )
        for number, (task, on_token, on_finished) in list(self._calls.items()):
            if not task.done():
                continue
            del self._calls[number]
            try:
                completion = task.result()
            except CalderaError as error:  # of this request: the others go on
                self._failures[number] = error
                continue
            if on_token is not None:
                for token, value in zip(completion.token_ids, completion.log_probs, strict=True):
                    on_token(number, token, value)
            if on_finished is not None:
                on_finished(number, completion)

    def abort(self, number: int) -> Completion | None:
        call = self._calls.pop(number, None)
        if call is None:
            return None
        call[0].cancel()
        self._loop.run_until_complete(asyncio.wait([call[0]]))
        return Completion([], [], "abort", self.version)

    def has_work(self) -> bool:
        return bool(self._calls or self._failures)

    async def _ask(self, request: Request) -> Completion:
        async with self._gate:
            model = await self._model_name()
            response = await self._client.ask("completions", _body(model, request), FAILURE)
        try:
            choice = response["choices"][0]
            tokens = [int(token) for token in choice["token_ids"]]
            log_probs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            reason = choice["finish_reason"]
        except (LookupError, TypeError, ValueError) as error:
            raise RolloutError(
                f"{self._client.told}: the response lacks token_ids (return_token_ids) or "
                f"logprobs.token_logprobs: {response!r:.500}"
            ) from error
        if reason not in ("stop", "length"):
            raise RolloutError(
                f"{self._client.told} ended a request with {reason!r}: {response!r:.500}"
            )
        if len(tokens) != len(log_probs):
            raise RolloutError(
                f"{self._client.told} gave {len(tokens)} tokens and {len(log_probs)} log-probs"
            )
        return Completion(tokens, log_probs, reason, self.version, ((self.version, len(tokens)),))

    async def _model_name(self) -> str:
        if self._model is None:
            response = await self._client.ask("models", None, FAILURE)
            try:
                names = [str(model["id"]) for model in response["data"]]
            except (LookupError, TypeError) as error:
                raise RolloutError(
                    f"{self._client.told}: /v1/models names no models: {response!r:.500}"
                ) from error
            if len(names) != 1:
                raise RolloutError(
                    f"{self._client.told} has the models {', '.join(names)}: "
                    "rollout.remote.model must name one"
                )
            self._model = names[0]
        return self._model


def _body(model: str, request: Request) -> dict[str, Any]:
    params = request.params
    return {
        "model": model,
        "prompt": [int(token) for token in request.prompt_ids],
        **{name: getattr(params, name) for name in SENT},
        **({"stop": list(params.stop), "include_stop_str_in_output": True} if params.stop else {}),
        "stop_token_ids": [] if params.ignore_eos else sorted(params.stop_token_ids),
        "seed": request.seed % SEED_RANGE,
        "logprobs": 0,  # of the sampled token, and of no others
        "return_token_ids": True,
    }


# ---- Asking a remote server in OpenAI's protocol

ATTEMPTS = 10
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_ANSWER = 3600.0
API_KEY = "CALDERA_API_KEY"
"""The variable with what a server asks for, if it does: it stands in no config and no dump."""
UNAUTHORISED = 401
SEED_RANGE = 2**31
"""A seed fits an integer of 32 bits, in case a server keeps it in one."""


class ServerClient:
    """An OpenAI-compatible server. Connections stay open until it is closed."""

    def __init__(self, url: str, key: str, connections: int) -> None:
        """`key` is what names the address in the config, for messages."""
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/"
        self.told = f"{key}={shown_url(url)!r}"
        secret = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {secret}"} if secret else None
        self._client = AsyncJsonClient(connections, SECONDS_TO_ANSWER, SECONDS_TO_CONNECT, headers)

    async def close(self) -> None:
        await self._client.close()

    async def ask(self, path: str, body: dict[str, Any] | None, failure: str) -> Any:
        """The JSON of the response to a POST, or to a GET if there is no body.

        A server that is away or busy is asked again; `failure` describes the failed request then.
        """
        retries = Retries(ATTEMPTS, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        try:
            return await retries.run_async(lambda: self._client.ask(self._url + path, body))
        except Unavailable as error:
            said = failure.format(attempts=ATTEMPTS, error=error)
            raise RolloutError(f"{self.told}: {said}") from error
        except Refused as error:
            if error.status == UNAUTHORISED:
                wrong = (
                    "is not the one that it" if os.environ.get(API_KEY) else "is not set, and it"
                )
                raise RolloutError(f"{self.told}: {API_KEY} {wrong} asks for, {error}") from error
            raise RolloutError(f"{self.told} refuses the request, {error}") from error
