"""Search by words (BM25, the one file that imports bm25s) and by meaning, and their fusion.

By meaning: vectors of a text encoder, compared by their inner products."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from caldera.data.chat import hf_tokenizer
from caldera.errors import ConfigError, DataError
from caldera.installation import install_command
from caldera.storage import local_path
from caldera.storage.paths import WEIGHT_FILES

Ranking = list[tuple[int, float]]
"""(place of a passage, its score), the best first; those of equal scores in the order of places."""
BLOCK = 64
FUSION_CONSTANT = 60
"""Of reciprocal rank fusion: how little the first ranks stand out."""


class Searcher(Protocol):
    """One way to search the passages of an index."""

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]: ...


def best(scores: numpy.ndarray[Any, Any], topk: int, above: float = -numpy.inf) -> Ranking:
    """The passages of the highest scores that are greater than `above`, out of all scores. (N,)"""
    places = numpy.flatnonzero((scores >= _bound(scores, topk)) & (scores > above))
    order = numpy.lexsort((places, -scores[places]))[:topk]
    return [(int(place), float(scores[place])) for place in places[order]]


def _bound(scores: numpy.ndarray[Any, Any], topk: int) -> float:
    """Not more than the score of rank `topk`, and not much less.

    Of blocks of scores, `topk` have a highest one that is at least this. Selecting among these few
    is much faster than among all scores, most of which are equal.
    """
    blocks = len(scores) // BLOCK
    if blocks <= topk:
        return -numpy.inf
    highest = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
    return float(numpy.partition(highest, blocks - topk)[blocks - topk])


def fused(rankings: Sequence[Ranking], topk: int) -> Ranking:
    """Reciprocal rank fusion: a passage gets 1 / (60 + its rank) from each list that has it."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, start=1):
            scores[place] = scores.get(place, 0.0) + 1 / (FUSION_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:topk]


K1, B = 0.9, 0.4
"""As search engines over passages of Wikipedia have them."""


class BM25Searcher:
    """Searches an index that `write_bm25` wrote, which is mapped into memory."""

    def __init__(self, folder: Path) -> None:
        bm25s = _bm25s()
        try:
            self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} holds no BM25 index: {error}") from error

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """Passages that share a word with the query; there may be fewer than `topk`."""
        return [self._search_one(words, topk) for words in _words(queries)]

    def _search_one(self, words: list[str], topk: int) -> Ranking:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        return best(self._index.get_scores(known), topk, above=0.0)


def write_bm25(texts: Iterable[str], folder: Path) -> None:
    """Index texts, whose places are their numbers."""
    read = list(texts)
    if not any(words for text in read for words in _words([text])):
        raise DataError("no passage of the corpus has a word that could be searched for")
    index = _bm25s().BM25(k1=K1, b=B)
    index.index(_words(read, as_numbers=True), show_progress=False)
    index.save(folder, show_progress=False)


def _words(texts: Sequence[str], as_numbers: bool = False) -> Any:
    """Words of two and more letters, in lower case, without those that every text has."""
    return _bm25s().tokenize(
        list(texts), stopwords="english", return_ids=as_numbers, show_progress=False
    )


def _bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"searching by words needs {error.name}, which is not installed: "
            f"{install_command('retriever')}"
        ) from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s


VECTORS = "vectors.npy"
LONGEST_TEXT = 256  # tokens; more is cut off
BATCH = 64
PASSAGES_AT_ONCE = 512
"""Whose vectors are computed together: those of like lengths share batches."""


class Encoder:
    """A BERT-like model whose vector of a text is the mean over its tokens, of length 1.

    Models of the E5 family get a prefix for queries and one for passages.
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
