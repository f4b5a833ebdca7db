"""Search by meaning: vectors of a text encoder, compared by their inner products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from caldera.data.chat import hf_tokenizer
from caldera.errors import ConfigError, DataError
from caldera.search_agent.retriever.ranking import Ranking, best
from caldera.storage import local_path
from caldera.storage.paths import WEIGHT_FILES

__all__ = ["DenseSearcher", "Encoder", "write_vectors"]

VECTORS = "vectors.npy"
LONGEST_TEXT = 256  # tokens; more is cut off
BATCH = 64
PASSAGES_AT_ONCE = 512
"""Whose vectors are computed together: those of like lengths share batches."""


class Encoder:
    """A BERT-like model whose vector of a text is the mean over its tokens, of length 1.

    Models of the E5 family are told which texts are queries and which are passages.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        from transformers import AutoModel

        path = local_path(model, "--model", WEIGHT_FILES)
        self._tokenizer = hf_tokenizer(path, key="--model")
        try:
            loaded = AutoModel.from_pretrained(path).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model={model!r}: no encoder there: {error}") from error
        try:
            self._model = loaded.to(device)
        except (RuntimeError, AssertionError) as error:  # as torch says that there is none
            raise ConfigError(f"--device={device!r}: {error}") from error
        self._device = device
        self._is_e5 = "e5" in Path(model).name.lower()

    @property
    def dimension(self) -> int:
        return int(self._model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> numpy.ndarray[Any, Any]:
        return self._encode([f"query: {text}" if self._is_e5 else text for text in texts])

    def passages(self, texts: Sequence[str]) -> numpy.ndarray[Any, Any]:
        return self._encode([f"passage: {text}" if self._is_e5 else text for text in texts])

    def _encode(self, texts: Sequence[str]) -> numpy.ndarray[Any, Any]:
        """(texts, dimension), in the order of the texts."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        vectors = numpy.empty((len(texts), self.dimension), dtype=numpy.float32)
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            vectors[places] = self._batch([texts[place] for place in places]).cpu().numpy()
        return vectors

    @torch.no_grad()
    def _batch(self, texts: list[str]) -> Tensor:
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=LONGEST_TEXT, return_tensors="pt"
        ).to(self._device)
        hidden = self._model(**tokens).last_hidden_state  # (texts, tokens, dimension)
        mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean.float(), dim=-1)


class DenseSearcher:
    """Compares a query with every passage: exact, by one product of matrices."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._encoder = encoder
        try:
            mapped = numpy.load(folder / VECTORS, mmap_mode="r")  # (N, dimension)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} holds no vectors: {error}") from error
        self._vectors = numpy.asarray(mapped)  # a plain view, whose products are no maps of files
        if self._vectors.shape[1] != encoder.dimension:
            raise ConfigError(
                f"the vectors of {folder} have {self._vectors.shape[1]} numbers, those of --model "
                f"{encoder.dimension}: serve with the model that built the index"
            )

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        wanted = self._encoder.queries(queries)
        rankings: list[Ranking] = []
        for start in range(0, len(wanted), BATCH):  # so that scores of all never exist at once
            scores = wanted[start : start + BATCH] @ self._vectors.T  # (queries, N)
            rankings += [best(row, topk) for row in scores]
        return rankings


def write_vectors(
    texts: Iterable[str], count: int, folder: Path, encoder: Encoder, earlier: Path | None = None
) -> None:
    """Write the vectors of `count` passages: those in the folder `earlier`, then the texts'."""
    folder.mkdir()
    vectors = numpy.lib.format.open_memmap(
        folder / VECTORS, mode="w+", dtype=numpy.float32, shape=(count, encoder.dimension)
    )
    done = 0
    if earlier is not None:
        known = numpy.load(earlier / VECTORS, mmap_mode="r")
        done = len(known)
        vectors[:done] = known
    for some in _chunks(texts):
        vectors[done : done + len(some)] = encoder.passages(some)
        done += len(some)
    assert done == count, f"{done} vectors of {count} passages"
    vectors.flush()


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while some := list(islice(remaining, PASSAGES_AT_ONCE)):
        yield some
