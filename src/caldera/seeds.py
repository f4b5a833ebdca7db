"""Seeds: one root seed derives them all, so that a run is a function of its config."""

from __future__ import annotations

import hashlib
import random


def derive_seed(root: int, *path: int | str) -> int:
    """A 63-bit seed for a place in the run, such as (step, prompt, repetition)."""
    text = "/".join(str(part) for part in (root, *path))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Whatever draws from a global generator, such as dropout, draws the same in every run."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
