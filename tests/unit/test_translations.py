"""A translated page says what its English page says: a page that fell behind is found here.

Prose cannot be compared. Compared are the blocks of the two pages in order (headings, paragraphs,
lists, rows of tables), code as it is, and in each block the names in code, the links and the
numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
TRANSLATIONS = sorted(
    path
    for pattern in ("*.zh.md", "docs/**/*.zh.md", "examples/**/*.zh.md")
    for path in REPOSITORY.glob(pattern)
)
NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?:[.,]\d+)*")
"""Not H200, which is a name."""
ANCHOR = re.compile(r'^<a id="[^"]+"></a>\n\n', re.MULTILINE)
"""Of the English heading, so that links lead to the same place in both languages."""
HAN = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def original(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


def blocks(page: Path) -> list[Token]:
    text = ANCHOR.sub("", page.read_text(encoding="utf-8"))
    return MarkdownIt().enable("table").parse(text)


def outline(page: Path) -> list[str]:
    """Kinds of blocks; of code all of it."""
    return [
        token.tag if token.type == "heading_open" else f"{token.type} {token.info} {code(token)}"
        for token in blocks(page)
    ]


def code(token: Token) -> str:
    return token.content if token.type in ("fence", "html_block") else ""


def names(token: Token) -> Counter[str]:
    """What stands in code, and where links and pictures lead."""
    found: Counter[str] = Counter()
    for child in token.children or []:
        if child.type == "code_inline":
            found[f"`{child.content}`"] += 1
        if place := child.attrGet("href") or child.attrGet("src"):
            found[str(place).replace(".zh.md", ".md")] += 1
    return found


def numbers(token: Token) -> set[str]:
    """In prose: those of code and links are compared with these."""
    prose = (child.content for child in token.children or [] if child.type == "text")
    return set(NUMBER.findall(" ".join(prose)))


def test_the_pages_are_found() -> None:
    assert {"README.zh.md", "docs/quickstart.zh.md"} <= {name(page) for page in TRANSLATIONS}


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name)
def test_a_translation_has_the_blocks_of_its_page(page: Path) -> None:
    """So the code that the tests execute on the English page is the translation's too."""
    assert outline(page) == outline(original(page))


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name)
def test_a_translation_has_the_names_and_numbers_of_its_page(page: Path) -> None:
    for here, there in zip(blocks(page), blocks(original(page)), strict=True):
        assert names(here) == names(there), f"{here.content}\n{there.content}"
        assert numbers(there) <= numbers(here), f"{here.content}\n{there.content}"


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name)
def test_a_translation_links_to_translations(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+\.md)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        translated = path.with_name(f"{path.stem}.zh.md")
        is_original = path == original(page) or target.endswith(".zh.md")
        assert is_original or not translated.exists(), f"link to {name(translated)}"


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name)
def test_no_space_stands_between_chinese_characters(page: Path) -> None:
    """A line that breaks there shows one."""
    for token in blocks(page):
        assert not re.search(f"{HAN}[ \n]{HAN}", token.content), token.content
