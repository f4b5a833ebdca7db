"""Tile configurations of the products of a decode step: what was fastest on an H200.

Measured within whole steps, for the sizes of Qwen2.5-0.5B: what is fastest alone often is not
beside kernels that start early by programmatic dependent launch.
"""

from __future__ import annotations

from typing import NamedTuple

SLABS = 4
"""A program without a loop reads two chunks of so many blocks."""


class WeightTile(NamedTuple):
    """The tile of one program that has all sequences."""

    columns: int  # rows of the weight
    depth: int  # cells of these that it multiplies at a time
    warps: int
    stages: int = 0  # blocks that are under way in a loop; 0: it reads all before it waits


class LayerTiles(NamedTuple):
    """The tile configurations of a layer for few sequences."""

    most: int  # sequences
    qkv_proj: WeightTile
    gate_up_proj: WeightTile
    o_proj: WeightTile  # split-K: one block a program
    down_proj: WeightTile


class SplitKTiles(NamedTuple):
    """The tile configuration of a product of more sequences, with split-K."""

    most: int  # sequences
    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    split_k: int = 1


LAYER_TILES = [
    LayerTiles(
        4,
        WeightTile(16, 128, 2),
        WeightTile(32, 128, 2),
        WeightTile(64, 256, 4),
        WeightTile(32, 512, 4),
    ),
    LayerTiles(
        8,
        WeightTile(16, 128, 2),
        WeightTile(32, 128, 2),
        WeightTile(64, 256, 4),
        WeightTile(128, 256, 8),
    ),
    LayerTiles(
        16,
        WeightTile(16, 128, 2),
        WeightTile(64, 128, 4, 5),
        WeightTile(64, 256, 4),
        WeightTile(64, 512, 8),
    ),
    LayerTiles(
        32,
        WeightTile(64, 128, 4, 4),
        WeightTile(64, 64, 4, 5),
        WeightTile(64, 256, 8),
        WeightTile(64, 512, 8),
    ),
    LayerTiles(
        64,
        WeightTile(64, 128, 4, 4),
        WeightTile(64, 64, 4, 5),
        WeightTile(64, 512, 4),
        WeightTile(128, 512, 8),
    ),
]
QKV_TILES = [SplitKTiles(512, 64, 64, 128, 4, 4)]
O_TILES = [
    SplitKTiles(128, 64, 64, 128, 3, 4, 7),
    SplitKTiles(256, 64, 64, 128, 3, 4, 4),
    SplitKTiles(512, 64, 128, 128, 3, 4, 2),
]
DOWN_TILES = [
    SplitKTiles(128, 64, 64, 128, 3, 4, 10),
    SplitKTiles(192, 64, 128, 64, 4, 4, 12),
    SplitKTiles(256, 128, 128, 64, 4, 4, 8),
    SplitKTiles(320, 128, 128, 64, 4, 4, 6),
    SplitKTiles(512, 128, 128, 64, 4, 4, 4),
]
