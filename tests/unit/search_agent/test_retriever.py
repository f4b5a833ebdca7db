"""Indexes over a few passages: what is found, in which order, and what is written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from caldera.errors import ConfigError, DataError
from caldera.search_agent.retriever import BuildOptions, Index, add_passages, build_index
from caldera.search_agent.retriever.searchers import VECTORS, Encoder, best, fused

pytest.importorskip("bm25s")

TEXTS = {
    "cats": "Cats sleep most of the day and hunt mice at night.",
    "dogs": "Dogs bark at strangers and guard the house.",
    "ships": "Ships sail over the sea; the largest carry oil.",
    "moon": "The moon circles the earth once a month.",
}
WORDS = sorted({word for text in TEXTS.values() for word in text.lower().split()})


def write_corpus(path: Path, titles: list[str]) -> Path:
    rows = [{"id": title, "contents": f'"{title}"\n{TEXTS[title]}'} for title in titles]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", list(TEXTS))


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder."""
    folder = tmp_path_factory.mktemp("encoder")
    names = ["[PAD]", "[UNK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def found(index: Index, query: str, topk: int = 2) -> list[str]:
    (hits,) = index.search([query], topk)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    return [hit.document["id"] for hit in hits]


def test_words_find_their_passage(corpus: Path, tmp_path: Path) -> None:
    assert build_index([corpus], tmp_path / "index", BuildOptions()).passages == 4
    index = Index(tmp_path / "index")
    assert found(index, "which animals hunt mice?")[0] == "cats"
    assert found(index, "OIL on the sea")[0] == "ships"
    assert found(index, "quasars") == [], "no passage has the word"
    assert found(index, "") == []
    (hits,) = index.search(["moon"], 1)
    assert hits[0].document["contents"].startswith('"moon"\nThe moon circles')


def test_a_compressed_corpus_is_the_same(corpus: Path, tmp_path: Path) -> None:
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    build_index([packed], tmp_path / "index", BuildOptions())
    assert found(Index(tmp_path / "index"), "bark")[0] == "dogs"


@pytest.mark.parametrize("method", ["bm25", "hybrid"])
def test_added_passages_are_as_if_built_at_once(
    method: str, tmp_path: Path, encoder_folder: Path
) -> None:
    one = write_corpus(tmp_path / "one.jsonl", ["cats", "dogs"])
    two = write_corpus(tmp_path / "two.jsonl", ["ships", "moon"])
    options = BuildOptions(method, str(encoder_folder) if method == "hybrid" else None)
    build_index([one, two], tmp_path / "whole", options)
    build_index([one], tmp_path / "grown", options)
    assert add_passages([two], tmp_path / "grown").passages == 4
    whole, grown = Index(tmp_path / "whole"), Index(tmp_path / "grown")
    for query in ("guard the sea", "moon", "hunt at night"):
        assert whole.search([query], 4) == grown.search([query], 4)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["grown", "whole"]


def test_vectors_are_means_of_length_one_and_searched_exactly(
    corpus: Path, tmp_path: Path, encoder_folder: Path
) -> None:
    build_index([corpus], tmp_path / "index", BuildOptions("dense", str(encoder_folder)))
    vectors = numpy.load(tmp_path / "index/dense" / VECTORS)
    assert vectors.shape == (4, 16)
    assert numpy.allclose(numpy.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    query = "cats hunt"
    expected = vectors @ Encoder(str(encoder_folder)).queries([query])[0]
    order = [list(TEXTS)[place] for place in numpy.argsort(-expected)]
    assert found(Index(tmp_path / "index"), query, topk=4) == order


def test_a_vector_does_not_depend_on_its_batch(encoder_folder: Path) -> None:
    encoder = Encoder(str(encoder_folder))
    together = encoder.passages(list(TEXTS.values()))
    for text, vector in zip(TEXTS.values(), together, strict=True):
        assert numpy.allclose(encoder.passages([text])[0], vector, atol=1e-5)


def test_ties_go_to_the_first() -> None:
    scores = numpy.asarray([0.5, 2.0, 2.0, 0.5, 2.0], dtype=numpy.float32)
    assert best(scores, 2) == [(1, 2.0), (2, 2.0)]
    assert best(scores, 9) == [(1, 2.0), (2, 2.0), (4, 2.0), (0, 0.5), (3, 0.5)]


def test_fusion_adds_reciprocal_ranks() -> None:
    ranking = fused([[(7, 9.0), (3, 1.0)], [(3, 0.2), (5, 0.1)]], 2)
    assert [number for number, _ in ranking] == [3, 7]
    assert [score for _, score in ranking] == pytest.approx([1 / 62 + 1 / 61, 1 / 61])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"id": "a"}', "line 2: a passage is an object with a text 'contents'"),
        ('{"contents": "a"}', "line 2: a passage needs an 'id'"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(
    line: str, message: str, corpus: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(corpus.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        build_index([bad], tmp_path / "index", BuildOptions())
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_is_refused(corpus: Path, tmp_path: Path, encoder_folder: Path) -> None:
    build_index([corpus], tmp_path / "index", BuildOptions())
    options, none = BuildOptions(), tmp_path / "none"
    cases: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "exists already", lambda: build_index([corpus], tmp_path / "index", options)),
        (ConfigError, "names the encoder", lambda: BuildOptions("dense")),
        (ConfigError, "names the encoder", lambda: BuildOptions("bm25", "M")),
        (ConfigError, "was built for bm25", lambda: Index(tmp_path / "index", "hybrid")),
        (DataError, "is no index", lambda: Index(tmp_path)),
        (DataError, "cannot read the corpus", lambda: build_index([none], tmp_path / "i", options)),
    ]  # fmt: skip
    for kind, message, act in cases:
        with pytest.raises(kind, match=message):
            act()


@pytest.mark.parametrize(
    "change", [lambda text: text[:-9], lambda text: text.replace("mice", "rats!")]
)
def test_passages_that_were_changed_are_not_served(
    change: Callable[[str], str], corpus: Path, tmp_path: Path
) -> None:
    build_index([corpus], tmp_path / "index", BuildOptions())
    lines = tmp_path / "index/passages.jsonl"
    lines.write_text(change(lines.read_text()))
    with pytest.raises(DataError, match=r"passages\.jsonl is not as it was written"):
        Index(tmp_path / "index")


def test_passages_of_another_index_are_not_served(corpus: Path, tmp_path: Path) -> None:
    build_index([corpus], tmp_path / "index", BuildOptions())
    build_index([write_corpus(tmp_path / "one.jsonl", ["cats"])], tmp_path / "one", BuildOptions())
    for name in ("passages.jsonl", "offsets.npy"):
        (tmp_path / "one" / name).replace(tmp_path / "index" / name)
    with pytest.raises(DataError, match=r"holds 1 passages, and index\.json names 4"):
        Index(tmp_path / "index")


@pytest.mark.parametrize("contents", ["", "the"])
def test_a_corpus_without_words_is_refused(contents: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "a", "contents": contents}) + "\n")
    with pytest.raises(DataError, match="has a word that could be searched for"):
        build_index([corpus], tmp_path / "index", BuildOptions())


def test_a_damaged_compressed_corpus_is_refused(corpus: Path, tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(corpus.read_bytes()))
    packed[12] ^= 0xFF  # the first block
    (tmp_path / "corpus.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"cannot read the corpus .*corpus\.jsonl\.gz"):
        build_index([tmp_path / "corpus.jsonl.gz"], tmp_path / "index", BuildOptions())


def test_the_folder_may_be_the_one_one_is_in(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index([corpus], tmp_path / "index", BuildOptions())
    monkeypatch.chdir(tmp_path / "index")
    assert add_passages([corpus], Path()).passages == 8
    assert len(Index(tmp_path / "index").passages) == 8


def test_an_index_whose_replacement_was_killed_is_still_there(corpus: Path, tmp_path: Path) -> None:
    build_index([corpus], tmp_path / "index", BuildOptions())
    (tmp_path / "index").rename(tmp_path / "index.replaced")  # the step before the last
    assert add_passages([corpus], tmp_path / "index").passages == 8
    assert not (tmp_path / "index.replaced").exists()


def test_an_encoder_is_found_from_another_folder(
    corpus: Path, tmp_path: Path, encoder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(encoder_folder.parent)
    build_index([corpus], tmp_path / "index", BuildOptions("dense", encoder_folder.name))
    monkeypatch.chdir(tmp_path)
    assert len(found(Index(tmp_path / "index"), "cats", topk=4)) == 4


def test_a_device_that_is_not_there(encoder_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--device='nowhere'"):
        Encoder(str(encoder_folder), "nowhere")
