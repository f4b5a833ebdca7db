"""The commands of a launch script, its variables put in."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

# ---- A bash script as statements of words, quotes and variables still in them
#
# It knows what launch scripts are made of: continued lines, comments, quotes, arrays, redirections.
# Nothing is executed.

HERE_DOCUMENT = re.compile(
    r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n.*?^\s*\2$", re.DOTALL | re.MULTILINE
)
CLOSING = {"$((": "))", "$(": ")", "${": "}", "`": "`"}


@dataclass
class Statement:
    """One simple command, or assignments."""

    line: int
    words: list[str] = field(default_factory=list)


@dataclass
class Lexer:
    """Reads one script."""

    text: str
    place: int = 0
    broken_by: list[int] = field(default_factory=list)
    """Lines that are comments amid a continued command, which end it in bash."""

    def __post_init__(self) -> None:
        self.text = HERE_DOCUMENT.sub(lambda m: m[3] + "\n" * m[0].count("\n"), self.text)

    def statements(self) -> list[Statement]:
        """All of them, in order."""
        found = [Statement(1)]
        continued = False  # whether the line before ends in a backslash
        while self.place < len(self.text):
            rest = self.text[self.place :]
            if space := re.match(r"[ \t]+", rest):
                self.place += len(space[0])
            elif rest.startswith("\\\n"):
                self.place += 2
                continued = True
            elif rest[0] == "#":
                self.place += len(rest.partition("\n")[0])
                if continued and found[-1].words:
                    self.broken_by.append(self._line())
                    self.place += 1  # the command goes on
            elif end := re.match(r"\n|;;?|&&|&(?!>)|\|\|?|[(){}](?=\s|$)|[()]", rest):
                self.place += len(end[0])
                continued = False
                found.append(Statement(self._line()))
            else:
                if not found[-1].words:
                    found[-1].line = self._line()
                found[-1].words.append(self._word())
                continued = False
        return [statement for statement in found if statement.words]

    def _line(self) -> int:
        return self.text.count("\n", 0, self.place) + 1

    def _word(self) -> str:
        """The word that starts here, as it is written; an array is one word."""
        start = self.place
        while self.place < len(self.text):
            rest = self.text[self.place :]
            if rest.startswith("\\\n"):
                break
            if rest[0] == "(" and self.text[start : self.place].endswith("="):
                self.place = self._after(self.place + 1, ")")
            elif rest[0] in " \t\n;|()" or (rest[0] == "&" and self.text[self.place - 1] != ">"):
                break
            else:
                self.place = self.after_piece(self.place)
        return self.text[start : self.place]

    def after_piece(self, place: int) -> int:
        """The place after a quoted text, an expansion or a character."""
        rest = self.text[place:]
        if rest[0] == "\\":
            return place + 2
        if rest[0] == "'":
            return self._found("'", place + 1)
        if rest[0] == '"':
            return self._after(place + 1, '"')
        for opening, closing in CLOSING.items():
            if rest.startswith(opening):
                return self._after(place + len(opening), closing)
        return place + 1

    def _after(self, place: int, closing: str) -> int:
        """The place after a closing mark, what is nested before it skipped."""
        while place < len(self.text) and not self.text.startswith(closing, place):
            in_quotes = closing == '"' and self.text[place] == "'"
            place = place + 1 if in_quotes else self.after_piece(place)
        return min(place + len(closing), len(self.text))

    def _found(self, mark: str, place: int) -> int:
        found = self.text.find(mark, place)
        return len(self.text) if found < 0 else found + 1


# ---- Texts of a script in which some parts are left for a shell to expand
#
# A `$` or a backtick in them is always the shell's. Those that the script quotes, such as in
# `'${actor_rollout_ref.actor.optim.lr}'`, are kept as characters that no script has.

QUOTED = {"$": "\ue000", "`": "\ue001"}
VARIABLE = re.compile(r"\$(\w+|[@*#?])")
VALUE = re.compile(r"\$(\w+|\{\w+\}|[@*#?])")
NAMED = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
"""A variable that an expansion refers to."""
NAME = re.compile(r"[A-Za-z_]\w*")
SPECIAL = {*'$`\\"!'}
"""What a shell does not leave alone within double quotes."""


def literal(text: str) -> str:
    """A text that the script has in quotes."""
    for sign, kept in QUOTED.items():
        text = text.replace(sign, kept)
    return text


def plain(text: str) -> str:
    """The text itself, for whom a `$` is a character like any other."""
    for sign, kept in QUOTED.items():
        text = text.replace(kept, sign)
    return text


def is_of_shell(text: str) -> bool:
    """Whether a part of it is left for a shell to expand."""
    return any(sign in text for sign in QUOTED)


def stand_in(text: str) -> str:
    """The text with `_` for each part that only a shell can tell."""
    return plain("".join("_" if expands else piece for piece, expands in pieces(text)))


def quoted(text: str) -> str:
    """The text as a shell takes it for one word."""
    if not is_of_shell(text):
        word = plain(text)
        # A single quote within single quotes takes five characters, and nobody can read them.
        return f'"{word}"' if "'" in word and not SPECIAL & {*word} else shlex.quote(word)
    # What an expansion has in quotes is read by itself, also within these ones.
    inside = (piece if expands else _escaped(piece) for piece, expands in pieces(text))
    return f'"{"".join(inside)}"'


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Its expansions, and what is between them: (text, whether it is an expansion)."""
    start = place = 0
    while place < len(text):
        if text[place] not in QUOTED:
            place += 1
            continue
        if start < place:
            yield text[start:place], False
        end = after_expansion(text, place)
        yield text[place:end], True
        start = place = end
    if start < len(text):
        yield text[start:], False


def after_expansion(text: str, place: int) -> int:
    """The place after the expansion that begins here."""
    name = VARIABLE.match(text, place)
    return name.end() if name else Lexer(text).after_piece(place)


def names_in(text: str) -> list[str]:
    """Variables that its expansions compute with; one that merely stands for its value is the
    shell's own, or would have been put in."""
    found = []
    for piece, expands in pieces(text):
        if expands and not VALUE.fullmatch(piece):
            found += (NAME if piece.startswith("$((") else NAMED).findall(piece)
    return found


def _escaped(piece: str) -> str:
    return plain(re.sub(r'(["\\\ue000\ue001])', r"\\\1", piece))


ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
CONTROL = {
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "for",
    "while",
    "until",
    "do",
    "done",
    "case",
    "esac",
    "time",
    "!",
    "nohup",
    "exec",
    "sudo",
}
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
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


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
        expanded = [
            text
            for word in self._without_redirections(words[assigned:])
            for text in self._fields(word)
        ]
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
