"""Asking an OpenAI-compatible server elsewhere."""

from __future__ import annotations

import os
from typing import Any

from caldera.errors import RolloutError
from caldera.http_client import AsyncJsonClient, Refused, Retries, Unavailable
from caldera.storage import shown_url

ATTEMPTS = 10
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_ANSWER = 3600.0
API_KEY = "CALDERA_API_KEY"
"""The variable with what a server asks for, if it does: it stands in no config and no dump."""
UNAUTHORISED = 401
SEEDS = 2**31
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
        """The JSON of the answer to a POST, or to a GET if there is no body.

        A server that is away or busy is asked again; `failure` says what did not succeed then.
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
