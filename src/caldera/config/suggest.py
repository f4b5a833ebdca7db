"""What an unknown key was most likely meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from caldera.config.migrate import moved_to
from caldera.errors import nearest

OF_TRAINING = re.compile(r"\b(?:actor_rollout_ref|algorithm|critic)(?:\.\w+)+")
"""A key in a note that other commands than `caldera train` lack."""
ALIKE = 0.65
"""How alike names of one group must be: 0.6, the usual bound, takes `server` for `seed`."""
ALMOST_THE_SAME = 0.85
"""How alike names of different groups must be: a likely typo, and no mere similarity."""


@dataclass(frozen=True)
class Alias:
    """The option of another library, or an older key of verl's, in Caldera's words."""

    places: tuple[str, ...]
    """Keys, or `key=value`, that stand for it; the first that a command has counts. None: there is
    no such key, and the note says why."""
    note: str
    """Left out where it names a key that the command lacks."""


@cache
def aliases() -> dict[str, Alias]:
    """Options of TRL, OpenRLHF, vLLM and Hugging Face, and keys of older releases of verl."""
    table = (Path(__file__).parent / "aliases.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in table.splitlines())
    return {name: Alias(tuple(places.split()), note) for name, places, note in rows}


def did_you_mean(key: str, keys: Iterable[str], moves: Mapping[str, str]) -> str:
    """The end of the sentence that refuses an unknown key."""
    known = list(keys)
    if hint := _alias_hint(key, known):
        return hint
    guess = _likely_key(moved_to(key, moves) or key, known)
    return f"; did you mean {guess}?" if guess else ""


def _alias_hint(key: str, keys: list[str]) -> str:
    """By the whole key, else by its end."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    alias = next((aliases()[end] for end in ends if end in aliases()), None)
    if alias is None:
        return ""
    fits = alias.note and all(name in keys for name in OF_TRAINING.findall(alias.note))
    note = f" ({alias.note})" if fits else ""
    places = [place for place in alias.places if place.partition("=")[0] in keys]
    if places:
        return f"; did you mean {max(places, key=lambda place: _shared(place, key))}?{note}"
    return "" if alias.places else f": {alias.note}"


def _shared(place: str, key: str) -> int:
    """How many groups two keys share from the start."""
    pairs = list(zip(place.split("."), key.split("."), strict=False))
    return next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))


def _likely_key(key: str, keys: list[str]) -> str | None:
    """A near name in the same group, the same name in another group, or almost the same one
    there."""
    group, leaf = _split(key)
    siblings = {_split(name)[1]: name for name in keys if _split(name)[0] == group}
    leaves = {_split(name)[1] for name in keys}
    is_elsewhere = not group and leaf in leaves  # its group alone was left out
    if not is_elsewhere and (near := nearest(leaf, siblings, ALIKE)):
        return siblings[near]
    near_leaf = leaf if leaf in leaves else nearest(leaf, leaves, ALMOST_THE_SAME)
    alike = [name for name in keys if _split(name)[1] == near_leaf]
    return max(alike, key=lambda name: _likeness(name, key), default=None)


def _split(key: str) -> tuple[str, str]:
    group, _, leaf = key.rpartition(".")
    return group, leaf


def _likeness(name: str, key: str) -> tuple[int, float]:
    """By groups that both name, then by letters; of a key without a group the first is meant."""
    theirs = set(key.split("."))
    in_both = len(theirs.intersection(name.split(".")))
    return in_both, difflib.SequenceMatcher(None, name, key).ratio() if len(theirs) > 1 else 0
