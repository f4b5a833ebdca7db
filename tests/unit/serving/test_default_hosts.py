"""Servers are for this machine alone unless the user asks otherwise."""

from __future__ import annotations

from typing import Any

from caldera.cli import sandbox_parser
from caldera.config.serve import ServerConfig
from caldera.search_agent.retriever.command import parser
from caldera.web import own_address

LOOPBACK = "127.0.0.1"


def test_the_commands_listen_on_loopback() -> None:
    assert parser().parse_args(["serve", "--index", "x"]).host == LOOPBACK
    assert sandbox_parser().parse_args(["serve"]).host == LOOPBACK
    assert ServerConfig().host == LOOPBACK


def test_a_server_of_sessions_listens_on_loopback(served: Any) -> None:
    assert served.server.address.startswith(f"{LOOPBACK}:")
    assert own_address(LOOPBACK) == LOOPBACK, "where the ranks of one machine meet"
