"""The commands of a launch script, its variables put in."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from caldera.trainer.migration.expansions import (
    VARIABLE,
    after_expansion,
    is_of_shell,
    literal,
    names_in,
    pieces,
    plain,
    quoted,
)
from caldera.trainer.migration.lexer import Lexer

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
CONTROL = {
    "if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac",
    "time", "!", "nohup", "exec", "sudo",
}  # fmt: skip
BRANCHES = {"if", "for", "while", "until", "case"}
CONDITIONS = "the script has branches or loops: each was read once, in order"
DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
REDIRECTION = re.compile(r"\d*(&?>>?|<)(.*)", re.DOTALL)
TESTS = {"[", "[[", "test"}
BRACED = re.compile(r"\$\{(\w+)(?::?([-=])(.*))?\}", re.DOTALL)
ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
TILDE = re.compile(r"((?:[A-Za-z_]\w*=)?)~(?=/|$)")
ITSELF = re.compile(
    r"\$BASH_SOURCE\b|\$\{BASH_SOURCE(\[0\])?\}|(?<=dirname \")\$0|(?<=dirname )\$0"
)
"""How a script finds the folder that it lies in."""
ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b), ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One command of a script."""

    line: int
    words: list[str]
    environment: dict[str, str]
    """What stands before it, and what was exported."""
    settings: dict[str, str]
    """Variables of the script that are needed for what is left to the shell, as a shell sets
    them."""


@dataclass
class Script:
    """A script whose statements are taken in order. What only a shell can know stays as it is
    written, such as `$HOME` or `$(pwd)`."""

    text: str
    path: str = "$0"
    """Where it lies."""
    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What may be otherwise in bash."""
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        lexer = Lexer(self.text)
        for statement in lexer.statements():
            self._take(statement.line, statement.words)
        for line in lexer.broken_by:
            self._note(
                f"line {line}: a comment amid a command, which ends it in bash; what follows was "
                "read as part of the command"
            )

    def _take(self, line: int, words: list[str]) -> None:
        while words and words[0] in CONTROL:
            if words[0] in BRANCHES:
                self._note(CONDITIONS)
            words = words[1:]
        if words and words[0] in TESTS:
            self._note(CONDITIONS)
        if words and words[0] == "unset":
            for name in words[1:]:
                self.variables.pop(name, None)
                self.exported.discard(name)
        declares = bool(words) and words[0] in DECLARATIONS
        exports = declares and words[0] == "export"
        words = words[1:] if declares else words
        assigned = 0
        while assigned < len(words) and ASSIGNMENT.fullmatch(words[assigned]):
            assigned += 1
        if declares or assigned == len(words):
            for word in words:
                self._assign(word, exports)
            return
        own = dict(self._value(word) for word in words[:assigned])
        expanded = [text for word in self._without_redirections(words[assigned:]) for text in
                    self._fields(word)]  # fmt: skip
        environment = {name: self.variables[name] for name in sorted(self.exported)} | own
        settings = self._settings([*expanded, *environment.values()])
        self.launches.append(Launch(line, expanded, environment, settings))

    def _settings(
        self, texts: Iterable[str], asked: frozenset[str] = frozenset()
    ) -> dict[str, str]:
        """What the texts need, and before it what that needs; `asked` is what needs them."""
        found: dict[str, str] = {}
        for name in (name for text in texts for name in names_in(text)):
            if name in found or name in asked:
                continue
            if name in self.arrays:
                items = self.arrays[name]
                found |= self._settings(items, asked | {name})
                found[name] = f"({' '.join(map(quoted, items))})"
            elif name in self.variables:
                found |= self._settings([self.variables[name]], asked | {name})
                found[name] = quoted(self.variables[name])
        return found

    def _without_redirections(self, words: list[str]) -> list[str]:
        kept: list[str] = []
        skips = False
        for word in words:
            redirection = REDIRECTION.fullmatch(word)
            if redirection is None and not skips:
                kept.append(word)
            skips = redirection is not None and not redirection[2]
        return kept

    # ------------------------------------------------------------------ variables

    def _assign(self, word: str, exports: bool) -> None:
        match = ASSIGNMENT.fullmatch(word)
        if match is None:  # an option, or a name that is exported later
            exports = exports and word in self.variables
        elif match[3].startswith("("):
            inside = Lexer(match[3][1:-1]).statements()  # in an array a new line ends nothing
            raw = [word for statement in inside for word in statement.words]
            items = [text for item in raw for text in self._fields(item)]
            self.arrays[match[1]] = (self.arrays.get(match[1], []) if match[2] else []) + items
            return
        else:
            name, value = self._value(word)
            self.variables[name] = value
        if exports:
            self.exported.add(word if match is None else match[1])

    def _value(self, word: str) -> tuple[str, str]:
        match = ASSIGNMENT.fullmatch(word)
        assert match is not None
        before = self.variables.get(match[1], "") if match[2] else ""
        return match[1], before + self._expanded(match[3])

    def _fields(self, word: str) -> list[str]:
        """The words that one becomes."""
        if array := ARRAY.fullmatch(word):
            if array[1] in self.arrays:
                return self.arrays[array[1]]
            self._note(f"{word}: not set in the script, left out")
            return []
        if word.strip('"') in ("$@", "$*", "${@}", "${@:1}"):
            self._note(f"{word}: the script's own arguments come here")
            return []
        fields: list[str] = []
        field: str | None = None
        for text, splits in self._pieces(word):
            first, *more = re.split(r"\s+", text) if splits else [text]
            if first or not splits:
                field = (field or "") + first
            for part in more:
                fields += [] if field is None else [field]
                field = part or None
        return fields if field is None else [*fields, field]

    def _expanded(self, raw: str) -> str:
        """A word without its quotes, with the values of its variables."""
        return "".join(text for text, _ in self._pieces(raw))

    def _pieces(self, raw: str) -> Iterator[tuple[str, bool]]:
        """The parts of a word without their quotes, and whether a shell splits each at spaces."""
        place, in_double = 0, False
        if tilde := TILDE.match(raw):
            yield f"{tilde[1]}{self._variable('$HOME')}", False
            place = tilde.end()
        while place < len(raw):
            character = raw[place]
            if character == '"':
                in_double = not in_double
                place += 1
                yield "", False
            elif character == "'" and not in_double:
                end = raw.find("'", place + 1)
                yield literal(raw[place + 1 : end]), False
                place = end + 1
            elif character == "\\" and (not in_double or raw[place + 1 : place + 2] in '"\\$`\n'):
                yield literal(raw[place + 1 : place + 2].strip("\n")), False
                place += 2
            elif character in "$`":
                end = after_expansion(raw, place)
                for piece, expands in pieces(self._variable(raw[place:end])):
                    yield piece, not in_double and not expands
                place = end
            else:
                yield character, False
                place += 1

    def _variable(self, written: str) -> str:
        """What an expansion stands for; itself where the script does not tell."""
        if written.startswith("$(("):
            return self._computed(written)
        braced = BRACED.fullmatch(written)
        bare = VARIABLE.fullmatch(written)
        name = braced[1] if braced else bare[1] if bare else None
        if name in self.variables:
            return self.variables[name]
        if braced and braced[2]:
            value = self._expanded(braced[3])
            if braced[2] == "=":
                self.variables[braced[1]] = value
            self._note(f"{written}: {value or 'nothing'} was taken, its default")
            return value
        return self._left(ITSELF.sub(lambda _: self.path, written))

    def _left(self, written: str) -> str:
        """An expansion that is left to the shell."""
        if is_of_shell(written):
            self._note(f"{written}: only the shell knows its value")
        return written

    def _computed(self, written: str) -> str:
        if is_of_shell(re.sub(r"\$(?=[\w{])", "", written[3:])):  # a command is part of it
            return self._left(written)
        names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", r"${\1}", written[3:-2])
        expression = self._expanded(names)
        try:
            return str(_number(ast.parse(expression.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return self._left(f"$(({expression}))")

    def _note(self, text: str) -> None:
        if plain(text) not in self.notes:
            self.notes.append(plain(text))


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError(ast.dump(node))
