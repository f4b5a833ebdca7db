"""Tests in a process that the tested program has no part in.

Names that the tests use and do not define are the program's. Calling one asks the program's process
for a value, which arrives as plain data: an object whose `==` always agrees cannot get here.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import symtable
import sys
import types
from typing import Any, BinaryIO, NoReturn

from caldera.sandbox.inside.wire import decode, encode

# ---- What names tests and programs use

# Built-ins that tests use on arguments and results. Any other that tests without a name of the
# program's use is taken to be what they test: `assert pow(2, 3) == 8` tests the program's `pow`.
HELPERS = frozenset(
    {
        "abs",
        "all",
        "any",
        "bool",
        "bytearray",
        "bytes",
        "callable",
        "complex",
        "dict",
        "dir",
        "enumerate",
        "float",
        "frozenset",
        "getattr",
        "hasattr",
        "id",
        "int",
        "isinstance",
        "issubclass",
        "iter",
        "len",
        "list",
        "map",
        "memoryview",
        "next",
        "object",
        "print",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "setattr",
        "slice",
        "sorted",
        "str",
        "super",
        "tuple",
        "type",
        "vars",
        "zip",
    }
)


def names_of_the_program(source: str) -> set[str]:
    """Names that the tests use and do not define. It depends on the tests alone.

    Where all these are built-ins, the tests are of a function that is named like one: the program
    has to define it. If helpers alone are used, any of them may be meant, and it has to define all.
    """
    used = _used_from_outside(source) - names_of_modules(source)
    if asked := used - set(dir(builtins)):
        return asked
    functions = {name for name in used if _is_function_or_type(name)}
    return functions - HELPERS or functions


def names_of_modules(source: str) -> set[str]:
    """Modules that the tests use without importing them: `math` in `math.isclose(...)`."""
    tree = ast.parse(source)
    owners = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    alone = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in owners
    }  # a function of the program's may have a module's name: `bisect([1, 2], 2)`
    return (_used_from_outside(source) & sys.stdlib_module_names) - alone


def _used_from_outside(source: str) -> set[str]:
    """Global names that are read somewhere and bound nowhere at the top."""
    top = symtable.symtable(source, "tests.py", "exec")
    used: set[str] = set()
    bound: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table is top or symbol.is_global()
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
    return used - bound - {"__name__"}


def _is_function_or_type(name: str) -> bool:
    value = getattr(builtins, name)
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    return callable(value) and not is_exception


# In tests these end a loop quietly: `all(map(f, values))` would be true of an f that raises one.
ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)


# ---- Tests, which call the program through a connection


class Remote:
    """Something of the program's: it can be called, be an argument of a call, have attributes."""

    __slots__ = ("_connection", "_reference")

    def __init__(self, connection: Connection, reference: Any) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._connection.call(self._reference, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return self._connection.call({"operation": "getattr"}, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._connection.call({"operation": "setattr"}, (self, name, value), {})


class Connection:
    """The line to the program's process."""

    def __init__(self, replies: BinaryIO, requests: BinaryIO) -> None:
        self.replies = replies
        self.requests = requests
        self.was_used = False

    def call(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.was_used = True
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
            _fail("the program has ended")
        reply = json.loads(line)
        if "missing" in reply:
            _fail(f"the program defines no {reply['missing']!r}")
        if "raised" in reply:
            raise _exception(str(reply["raised"]), str(reply.get("message")))
        return decode(reply["value"], lambda reference: Remote(self, reference))

    def _reference_of(self, value: Any) -> Any:
        if not isinstance(value, Remote):
            raise TypeError(f"a {type(value).__name__} cannot be sent to the program")
        return value._reference


def _fail(why: str) -> NoReturn:
    """Not an exception: tests that expect one of the program's would take it for that."""
    os.write(2, f"AssertionError: {why}\n".encode(errors="backslashreplace"))
    os._exit(1)


def _exception(name: str, message: str) -> Exception:
    """The built-in exception of this name, so that tests may expect it."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in ENDS_OF_LOOPS:
        try:
            return kind(message)
        except TypeError:  # such as UnicodeDecodeError, which is made of more than a message
            pass
    return RuntimeError(f"{name}: {message}")


def run_tests(source: str, replies: BinaryIO, requests: BinaryIO) -> None:
    """Raises what the first failing test raises; tests that ask the program for nothing fail."""
    connection = Connection(replies, requests)
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # where unittest looks for tests
    names = main.__dict__
    for name in names_of_modules(source):
        names[name] = importlib.import_module(name)
    for name in names_of_the_program(source):
        names[name] = Remote(connection, name)
    try:
        exec(compile(source, "tests.py", "exec"), names)
    except SystemExit as exit_:  # as at the end of unittest.main()
        if exit_.code:
            raise
    if not connection.was_used:
        _fail("the tests ask the program for nothing")
