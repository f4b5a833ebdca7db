"""Whether scorers find an answer in the responses, and in which format models write it instead."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caldera.reward.default import scores_by_source
from caldera.reward.manager import RewardManager, is_built_in
from caldera.reward_score.math_dapo import NO_ANSWER
from caldera.reward_score.predictions import FORMATS, Reader, find_reader

logger = logging.getLogger(__name__)

PRED = "pred"
"""What a scorer calls the answer that it has found in a response."""


def has_answer(pred: object) -> bool:
    """Whether a scorer has found an answer, by what it returned as `pred`."""
    return pred not in (None, "", NO_ANSWER)


MANY = 0.25
"""Share of the responses from which on another format is worth a warning."""


@dataclass(frozen=True)
class FormatCounts:
    """How many responses of a data source hold an answer, and how it is written."""

    reader: Reader
    found: Sequence[tuple[bool, Collection[str]]]
    """Of each response: whether the scorer finds an answer, and the `FORMATS` that are in it."""

    @property
    def parsed(self) -> int:
        """In so many does the scorer find an answer."""
        return sum(is_parsed for is_parsed, _ in self.found)

    def shares(self) -> dict[str, float]:
        """`parsed`, and `format_...` of every format."""
        counts = {"parsed": self.parsed}
        for name in FORMATS:
            counts[f"format_{name}"] = sum(name in written for _, written in self.found)
        return {name: count / len(self.found) for name, count in counts.items()}

    def warning(self, data_source: str) -> str | None:
        """What to do where more responses are in another format than in the one that is read."""
        unread = [written for is_parsed, written in self.found if not is_parsed]
        others = [name for name in FORMATS if name != self.reader.format]
        count, other = max(
            ((sum(name in written for written in unread), name) for name in others),
            key=lambda counted: counted[0],
        )
        if count <= self.parsed or count < MANY * len(self.found):
            return None
        wanted, found = FORMATS[self.reader.format], FORMATS[other]
        source = f"set data_source={found.read_by!r} in the data, or " if found.read_by else ""
        return (
            f"{data_source}: its scorer finds an answer in {self.parsed} of {len(self.found)} "
            f"responses; {count} have `{found.example}`, which it does not read. Ask for "
            f"`{wanted.example}` in the prompts, {source}give a custom function "
            "(custom_reward_function.path)"
        )


class AnswerFormats:
    """Looks at responses as the scorers by data source do; warns once of each data source."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        """`options` are those of the scorers; None: a custom function scores, which may read
        anything."""
        self._options = options
        self._warned: set[str] = set()

    @property
    def are_known(self) -> bool:
        """Whether the scorers by data source score."""
        return self._options is not None

    @classmethod
    def of(cls, manager: RewardManager) -> AnswerFormats:
        """Of what a reward manager scores."""
        inner: Any = inspect.unwrap(manager)
        if is_built_in(inner) and scores_by_source(inner.compute_score):
            return cls(inner.reward_kwargs)
        return cls(None)

    def counts(
        self, data_sources: Sequence[str], responses: Sequence[str]
    ) -> dict[str, FormatCounts]:
        """Of each data source whose scorer looks for an answer in a response."""
        by_source: dict[str, list[str]] = {}
        for source, response in zip(data_sources, responses, strict=True):
            by_source.setdefault(source, []).append(response)
        options = self._options
        readers = {} if options is None else {s: find_reader(s, options) for s in by_source}
        return {
            source: FormatCounts(reader, [_found(reader, text) for text in by_source[source]])
            for source, reader in readers.items()
            if reader is not None
        }

    def warn(self, counts: Mapping[str, FormatCounts]) -> None:
        """Log what there is to do about a data source, once."""
        for source, counted in counts.items():
            if source not in self._warned and (said := counted.warning(source)):
                self._warned.add(source)
                logger.warning("%s", said)


def _found(reader: Reader, response: str) -> tuple[bool, Collection[str]]:
    written = [name for name, each in FORMATS.items() if each.pattern.search(response)]
    return reader.extract(response) is not None, written
