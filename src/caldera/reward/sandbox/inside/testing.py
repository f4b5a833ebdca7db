"""Tests in a process that the tested program has no part in.

Names that the tests use and do not define are the program's. Calling one asks the program's process
for a value, which arrives as plain data: an object whose `==` always agrees cannot get here.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import sys
from typing import Any, BinaryIO

from caldera.reward.sandbox.inside.wire import decode, encode

__all__ = ["run_tests"]


class Remote:
    """Something of the program's: it can be called, and be an argument of a call."""

    def __init__(self, connection: Connection, reference: Any) -> None:
        self._connection = connection
        self._reference = reference

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._connection.call(self._reference, arguments, keywords)


class Connection:
    """The line to the program's process."""

    def __init__(self, replies: BinaryIO, requests: BinaryIO) -> None:
        self.replies = replies
        self.requests = requests

    def call(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        request = {
            "function": function,
            "arguments": encode(arguments, self._reference_of),
            "keywords": encode(keywords, self._reference_of),
        }
        try:
            self.requests.write(json.dumps(request).encode() + b"\n")
            self.requests.flush()
            line = self.replies.readline()
        except OSError:
            line = b""
        if not line:
            raise AssertionError("the program has ended")
        reply = json.loads(line)
        if "raised" in reply:
            raise _exception(str(reply["raised"]), str(reply.get("message")))
        return decode(reply["value"], lambda reference: Remote(self, reference))

    def _reference_of(self, value: Any) -> Any:
        if not isinstance(value, Remote):
            raise TypeError(f"a {type(value).__name__} cannot be sent to the program")
        return value._reference


def _exception(name: str, message: str) -> Exception:
    """The built-in exception of this name, so that tests may expect it."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # such as UnicodeDecodeError, which is made of more than a message
            pass
    return RuntimeError(f"{name}: {message}")


def run_tests(source: str, replies: BinaryIO, requests: BinaryIO) -> None:
    """Raises what the first failing test raises."""
    connection = Connection(replies, requests)
    tree = ast.parse(source)
    names: dict[str, Any] = {"__name__": "tests"}
    for name in _names_from_outside(tree):
        if name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        else:
            names[name] = Remote(connection, name)
    exec(compile(tree, "tests.py", "exec"), names)


def _names_from_outside(tree: ast.AST) -> set[str]:
    used: set[str] = set()
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined
