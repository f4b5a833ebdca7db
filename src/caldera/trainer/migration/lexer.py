"""A bash script as statements of words, quotes and variables still in them.

It knows what launch scripts are made of: continued lines, comments, quotes, arrays, redirections.
Nothing is executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
