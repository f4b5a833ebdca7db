"""Texts of a script in which some parts are left for a shell to expand.

A `$` or a backtick in them is always the shell's. Those that the script quotes, such as in
`'${actor_rollout_ref.actor.optim.lr}'`, are kept as characters that no script has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from caldera.trainer.migration.lexer import Lexer

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
