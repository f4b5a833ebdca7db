"""How the products of a decode step are divided among programs: what was fastest on an H200.

Measured within whole steps, for the sizes of Qwen2.5-0.5B: what is fastest alone often is not
beside kernels that have been begun early.
"""

from __future__ import annotations

from typing import NamedTuple

SLABS = 4
"""A program without a loop reads two chunks of so many blocks."""


class Strip(NamedTuple):
    """What a program has of a product that has all sequences."""

    columns: int  # rows of the weight
    depth: int  # cells of these that it multiplies at a time
    warps: int
    stages: int = 0  # blocks that are under way in a loop; 0: it reads all before it waits


class Strips(NamedTuple):
    """How the products of a layer of few sequences are divided among programs."""

    most: int  # sequences
    inward: Strip
    gates: Strip
    outward: Strip  # one block a program, and as many parts as there are blocks
    down: Strip


class Tiles(NamedTuple):
    """How a product of more sequences is divided among programs."""

    most: int  # sequences
    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    parts: int = 1  # of the depth


STRIPS = [
    Strips(4, Strip(16, 128, 2), Strip(32, 128, 2), Strip(64, 256, 4), Strip(32, 512, 4)),
    Strips(8, Strip(16, 128, 2), Strip(32, 128, 2), Strip(64, 256, 4), Strip(128, 256, 8)),
    Strips(16, Strip(16, 128, 2), Strip(64, 128, 4, 5), Strip(64, 256, 4), Strip(64, 512, 8)),
    Strips(32, Strip(64, 128, 4, 4), Strip(64, 64, 4, 5), Strip(64, 256, 8), Strip(64, 512, 8)),
    Strips(64, Strip(64, 128, 4, 4), Strip(64, 64, 4, 5), Strip(64, 512, 4), Strip(128, 512, 8)),
]
INWARD = [Tiles(512, 64, 64, 128, 4, 4)]
OUTWARD = [
    Tiles(128, 64, 64, 128, 3, 4, 7),
    Tiles(256, 64, 64, 128, 3, 4, 4),
    Tiles(512, 64, 128, 128, 3, 4, 2),
]
DOWN = [
    Tiles(128, 64, 64, 128, 3, 4, 10),
    Tiles(192, 64, 128, 64, 4, 4, 12),
    Tiles(256, 128, 128, 64, 4, 4, 8),
    Tiles(320, 128, 128, 64, 4, 4, 6),
    Tiles(512, 128, 128, 64, 4, 4, 4),
]
