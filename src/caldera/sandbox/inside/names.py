"""Which names in tests are the program's, which are modules and which are Python's own."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys

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
