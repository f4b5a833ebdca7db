"""Names for the contents of pages: two pages with one name hold the same keys and values."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from caldera.rollout.native.blocks import PAGE_SIZE

DIGEST_BYTES = 16


def extend_keys(keys: list[bytes], tokens: NDArray[np.integer], pages: int) -> None:
    """Add keys until each of the first full pages of these tokens has one.

    What a page holds depends on all tokens up to its end, so its key contains the key before it.
    """
    for page in range(len(keys), pages):
        part = tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].astype(np.int32)
        digest = blake2b(keys[-1] if keys else b"", digest_size=DIGEST_BYTES)
        digest.update(part.tobytes())
        keys.append(digest.digest())
