"""Means, variances and sums over masks, rows and groups.

Shapes: a Matrix is B rows of R numbers; a mask is a Matrix of zeros and ones.
Sums use math.fsum, which is exactly rounded: the result depends on no order of summation.

    masked_mean(x)   = sum of x where mask is 1 / (count + 1e-8)
    masked_var(x)    = unbiased variance of x where mask is 1; an error if count <= 1
    masked_whiten(x) = (x - masked_mean) / sqrt(masked_var + 1e-8)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Row = list[float]
Matrix = list[Row]

EPSILON = 1e-8


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def sign(x: float) -> float:
    if x > 0:
        return 1.0
    return -1.0 if x < 0 else 0.0


def zeros(like: Matrix) -> Matrix:
    return [[0.0 for _ in row] for row in like]


def each(function: Callable[..., float], *matrices: Matrix) -> Matrix:
    """Apply `function` to the matrices element by element."""
    return [
        [function(*values) for values in zip(*rows, strict=True)]
        for rows in zip(*matrices, strict=True)
    ]


def kept(values: Sequence[float], mask: Sequence[float]) -> list[float]:
    """The values of one row where its mask is 1."""
    return [value for value, here in zip(values, mask, strict=True) if here]


def kept_of_all(matrix: Matrix, mask: Matrix) -> list[float]:
    """The values of all rows where the mask is 1."""
    found: list[float] = []
    for row, mask_row in zip(matrix, mask, strict=True):
        found.extend(kept(row, mask_row))
    return found


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def unbiased_std(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def masked_mean(matrix: Matrix, mask: Matrix) -> float:
    values = kept_of_all(matrix, mask)
    return math.fsum(values) / (len(values) + EPSILON)


def masked_var(matrix: Matrix, mask: Matrix) -> float:
    values = kept_of_all(matrix, mask)
    if len(values) <= 1:
        raise ValueError("a variance needs two values")
    middle = masked_mean(matrix, mask)
    biased = math.fsum((v - middle) ** 2 for v in values) / (len(values) + EPSILON)
    return biased * len(values) / (len(values) - 1)


def masked_whiten(matrix: Matrix, mask: Matrix) -> Matrix:
    """Whiten; entries outside the mask are set to 0."""
    middle = masked_mean(matrix, mask)
    scale = 1 / math.sqrt(masked_var(matrix, mask) + EPSILON)
    return each(lambda x, here: (x - middle) * scale * here, matrix, mask)


def row_sums(matrix: Matrix) -> list[float]:
    return [math.fsum(row) for row in matrix]


def spread(per_row: Sequence[float], mask: Matrix) -> Matrix:
    """One number a row, written on each of its masked-in tokens."""
    return [[value * here for here in row] for value, row in zip(per_row, mask, strict=True)]


def groups(uid: Sequence[str]) -> dict[str, list[int]]:
    """Rows of each uid, in the order of the batch."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(uid):
        found.setdefault(name, []).append(row)
    return found
