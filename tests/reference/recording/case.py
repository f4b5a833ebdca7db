"""The shape of a recorded case and of a file of cases."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Case:
    name: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    expected: dict[str, Any] | None
    """None: the function must refuse the inputs."""


@dataclass
class CaseFile:
    function: str
    family: str
    zero_outside_mask: list[str] = field(default_factory=list)
    """Outputs that must be 0 where response_mask is 0."""
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        name: str,
        inputs: dict[str, Any],
        params: dict[str, Any],
        expected: dict[str, Any] | None,
    ) -> None:
        self.cases.append(Case(name, inputs, params, rounded(expected)))

    def text(self) -> str:
        """The JSON file."""
        head = {
            "function": self.function,
            "family": self.family,
            "zero_outside_mask": self.zero_outside_mask,
        }
        cases = [
            {"name": c.name, "params": c.params, "inputs": c.inputs, "expected": c.expected}
            for c in self.cases
        ]
        return written({**head, "cases": cases}, 0) + "\n"


def rounded(value: Any) -> Any:
    """Twelve digits: enough for any tolerance, and the same whatever the C library's last bit."""
    if isinstance(value, float):
        short = float(f"{value:.12g}")
        return 0.0 if short == 0 else short
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def written(value: Any, depth: int) -> str:
    """JSON with one row of a matrix on a line."""
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {written(item, depth + 1)}" for key, item in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, list) and value and isinstance(value[0], list | dict):
        items = [written(item, depth + 1) for item in value]
        opening, closing = "[", "]"
    else:
        return json.dumps(value, allow_nan=False)
    inner = "\n" + " " * (depth + 1)
    return opening + inner + ("," + inner).join(items) + "\n" + " " * depth + closing
