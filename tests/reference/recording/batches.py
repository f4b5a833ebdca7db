"""Small batches of every awkward shape, from a seeded generator.

Numbers have four decimals, so that a case can be typed in by hand. Outside the mask stand
ordinary numbers, not zeros: a function that forgets the mask is found out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from naive.basics import Matrix, Row

ROWS, WIDTH = 8, 7
FAR_ROW = 2
MASKS = ("ordinary", "observation", "empty_rows")


class Batches:
    """Draws of one seed; each name gives a stream of its own, so that cases do not move others."""

    def __init__(self, name: str) -> None:
        self.random = random.Random(f"reference numerics: {name}")

    def number(self, low: float, high: float) -> float:
        # random() is the one draw that every Python version makes alike.
        return round(low + (high - low) * self.random.random(), 4)

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + int((high - low + 1) * self.random.random())

    def numbers(self, count: int, low: float, high: float) -> Row:
        return [self.number(low, high) for _ in range(count)]

    def matrix(self, mask: Matrix, low: float, high: float) -> Matrix:
        return [self.numbers(len(row), low, high) for row in mask]

    def mask(self, kind: str, rows: int = ROWS, width: int = WIDTH) -> Matrix:
        """`ordinary`: tokens, then padding. `observation`: with zeros before and between.
        `empty_rows`: two responses without any token of the model."""
        mask = [self.mask_row(kind == "observation", width) for _ in range(rows)]
        mask[0] = [1.0] * (width - 1) + [1.0 if kind != "observation" else 0.0]
        if kind == "empty_rows":
            mask[2] = [0.0] * width
            mask[rows - 1] = [0.0] * width
        return mask

    def mask_row(self, observations: bool, width: int) -> Row:
        if not observations:
            length = self.integer(2, width)
            return [1.0] * length + [0.0] * (width - length)
        before = self.integer(0, 1)
        first, between, last = self.integer(1, 2), self.integer(1, 2), self.integer(1, 2)
        row = [0.0] * before + [1.0] * first + [0.0] * between + [1.0] * last
        return row + [0.0] * (width - len(row))

    def log_probs(self, mask: Matrix) -> Matrix:
        return self.matrix(mask, -3.0, -0.05)

    def moved(self, log_probs: Matrix, far: float = 0.0) -> Matrix:
        """Other log-probs of the same tokens; half of them, and one whole row, lower by `far`."""
        result: Matrix = []
        for index, row in enumerate(log_probs):
            others: Row = []
            for value in row:
                moved = value + self.number(-0.6, 0.6)
                if far and (self.random.random() < 0.5 or index == FAR_ROW):
                    moved = value - far
                others.append(round(min(moved, -0.01), 4))
            result.append(others)
        return result

    def pair(self, mask: Matrix, far: float = 0.0) -> tuple[Matrix, Matrix]:
        """Log-probs of two policies; with log ratios of `far`, and in other rows of -`far`."""
        one = self.log_probs(mask)
        other = self.moved(one, far)
        if far:
            for row in range(0, len(mask), 2):
                one[row], other[row] = other[row], one[row]
        return one, other

    def sum_pi_squared(self, log_probs: Matrix) -> Matrix:
        """Between pi^2 and pi^2 + (1 - pi)^2, as of a real distribution."""
        result: Matrix = []
        for row in log_probs:
            squares: Row = []
            for value in row:
                pi = math.exp(value)
                squares.append(round(pi**2 + self.random.random() * (1 - pi) ** 2, 4))
            result.append(squares)
        return result


def at_last_token(scores: Row, mask: Matrix) -> Matrix:
    """Scores on the last masked-in token; of a response without any, on its first place."""
    rewards: Matrix = []
    for score, row in zip(scores, mask, strict=True):
        last = max((t for t, here in enumerate(row) if here), default=0)
        rewards.append([score if t == last else 0.0 for t in range(len(row))])
    return rewards


def on_next_place(scores: Row, mask: Matrix) -> Matrix:
    """Scores one place after the last masked-in token, where there is one: mask 0 there."""
    rewards: Matrix = []
    for score, row in zip(scores, mask, strict=True):
        last = max((t for t, here in enumerate(row) if here), default=0)
        place = min(last + 1, len(row) - 1)
        rewards.append([score if t == place else 0.0 for t in range(len(row))])
    return rewards


def on_mask(draw: Callable[[], float], mask: Matrix) -> Matrix:
    """A reward on each masked-in token."""
    return [[draw() if here else 0.0 for here in row] for row in mask]
