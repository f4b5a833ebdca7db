"""Counters, gauges and histograms of a server, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FAILED = 500
"""The status of a request that the sampler has failed."""

Labels = tuple[tuple[str, str], ...]


class Metric:
    """A counter or a gauge, with a value for each combination of labels."""

    def __init__(self, name: str, kind: str, meaning: str) -> None:
        self.name = f"caldera_{name}"
        self._head = [f"# HELP {self.name} {meaning}", f"# TYPE {self.name} {kind}"]
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        self._values[key] = self._values.get(key, 0) + amount

    def set(self, value: float) -> None:
        self._values[()] = value

    def total(self) -> float:
        return sum(list(self._values.values()))

    def of(self, **labels: str) -> float:
        """The sum over all values with these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in list(self._values.items()) if wanted <= set(key))

    def lines(self) -> list[str]:
        values = self._values or {(): 0.0}
        return [*self._head, *(_line(self.name, key, value) for key, value in values.items())]


class Histogram:
    """How often a time was in each of some ranges."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name = f"caldera_{name}"
        self._head = [f"# HELP {self.name} {meaning}", f"# TYPE {self.name} histogram"]
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        lines, seen = list(self._head), 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            seen += count
            lines.append(_line(f"{self.name}_bucket", (("le", bound),), seen))
        return [*lines, _line(f"{self.name}_sum", (), self._sum), f"{self.name}_count {seen}"]


class ServerMetrics:
    """All of a server's. One thread alone changes them."""

    def __init__(self) -> None:
        self.requests = Metric("requests_total", "counter", "Requests answered, by path and status")
        self.cancelled = Metric(
            "requests_cancelled_total", "counter", "Requests given up by clients"
        )
        self.cut_off = Metric("requests_cut_off_total", "counter", "Requests ended by the server")
        self.lost = Metric(
            "requests_lost_total", "counter", "Requests that failed with the sampler, status 500"
        )
        self.restarts = Metric(
            "engine_restarts_total", "counter", "Engines that died and were started anew"
        )
        self.running = Metric("requests_running", "gauge", "Requests that are being answered")
        self.read = Metric("prompt_tokens_total", "counter", "Tokens of prompts")
        self.written = Metric("generated_tokens_total", "counter", "Tokens of responses")
        self.malformed = Metric(
            "malformed_tool_calls_total", "counter", "Calls of tools that could not be read"
        )
        self.encoded_again = Metric(
            "answers_encoded_again_total",
            "counter",
            "Sampled responses whose tokens the chat template did not let through",
        )
        self.sessions = Metric("sessions", "gauge", "Sessions that are kept")
        self.forgotten = Metric("sessions_forgotten_total", "counter", "Sessions not kept any more")
        self.version = Metric(
            "weight_version", "gauge", "Version of the weights of the last response"
        )
        self.seconds = Histogram(
            "request_seconds", "Time from a request to the end of its response"
        )
        self.first = Histogram("first_token_seconds", "Time to the first token of a stream")

    def count(self, path: str, status: int) -> None:
        """A request has its response."""
        self.requests.add(path=path, status=str(status))
        self.lost.add(status == FAILED)

    def text(self) -> str:
        return "".join(f"{line}\n" for metric in vars(self).values() for line in metric.lines())


def _line(name: str, labels: Labels, value: float) -> str:
    shown = str(int(value)) if value == int(value) else repr(value)
    return f"{name}{_shown(labels)} {shown}"


def _shown(labels: Iterable[tuple[str, str]]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
