"""Random orders that are pure functions of their seeds."""

from __future__ import annotations

import numpy as np


def seeded_permutation(count: int, *seeds: int) -> list[int]:
    """A random order of range(count), the same for the same seeds.

    It sorts raw draws, whose stream NumPy promises to keep; the stream of
    `Generator.permutation` may change between releases, and a resumed run would go astray.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64 for seed in seeds]))
    order: list[int] = np.argsort(bits.random_raw(count), kind="stable").tolist()
    return order
