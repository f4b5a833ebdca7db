"""Asking a server elsewhere, patiently."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx2

from caldera.errors import RolloutError
from caldera.storage import shown_url

ATTEMPTS = 10
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_ANSWER = 3600.0
BUSY_STATUSES = (408, 425, 429)
"""Those below 500 that are worth another attempt."""
API_KEY = "CALDERA_API_KEY"
"""The variable with what a server asks for, if it does: it stands in no config and no dump."""
UNAUTHORISED = 401
SEEDS = 2**31
"""A seed fits an integer of 32 bits, in case a server keeps it in one."""


class _Unavailable(Exception):
    """Another attempt may succeed."""


class ServerClient:
    """An OpenAI-compatible server. Connections stay open until it is closed."""

    def __init__(self, url: str, key: str, connections: int) -> None:
        """`key` is what names the address in the config, for messages."""
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/"
        self.told = f"{key}={shown_url(url)!r}"
        secret = os.environ.get(API_KEY)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {secret}"} if secret else None,
            timeout=httpx2.Timeout(SECONDS_TO_ANSWER, connect=SECONDS_TO_CONNECT),
            limits=httpx2.Limits(max_connections=connections),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, path: str, body: dict[str, Any] | None, failure: str) -> Any:
        """The JSON of the answer to a POST, or to a GET if there is no body.

        A server that is away or busy is asked again; `failure` says what did not succeed then.
        """
        pause = FIRST_PAUSE_SECONDS
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return await self._send(path, body)
            except _Unavailable as error:
                if not attempts_left:
                    raise RolloutError(
                        f"{self.told}: {failure.format(attempts=ATTEMPTS, error=error)}"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        method = "GET" if body is None else "POST"
        try:
            response = await self._client.request(method, self._url + path, json=body)
        except httpx2.TransportError as error:
            raise _Unavailable(str(error) or type(error).__name__) from error
        status = response.status_code
        told = f"status {status}: {response.text[:500]}"
        if status >= 500 or status in BUSY_STATUSES:
            raise _Unavailable(told)
        if status == UNAUTHORISED:
            wrong = "is not the one that it" if os.environ.get(API_KEY) else "is not set, and it"
            raise RolloutError(f"{self.told}: {API_KEY} {wrong} asks for, {told}")
        if not response.is_success:
            raise RolloutError(f"{self.told} refuses the request, {told}")
        try:
            return response.json()
        except ValueError as error:
            raise _Unavailable(f"no JSON: {response.text[:500]}") from error
