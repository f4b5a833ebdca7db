"""Write the pages of the documentation site to build/pages, which MkDocs reads (mkdocs.yml).

The repository's Markdown is written for a reader of the repository: a page links to an example, a
script or a decision by its path, and formulas are code. Here links become links between pages of
the site, files that are not Markdown become pages that show them, and formulas become MathML, so
that the site needs no JavaScript for them and nothing from the network.

MkDocs calls `on_config` before each build.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build/pages"
LANGUAGES = {"py": "python", "sh": "bash", "sbatch": "bash", "yml": "yaml", "cff": "yaml"}
"""Of files that are shown, where the extension is not the name of the language."""
READMES = (PurePosixPath("README.md"), PurePosixPath("README.zh.md"))
"""Of the repository: on the site, docs/index.md stands for them."""

FENCE = re.compile(r"^( *)(`{3,})(\w*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
UPRIGHT = re.compile(r'(?:<mi mathvariant="normal">\w</mi>){2,}')
"""A word in a formula, which the converter takes apart."""
INLINE_MATH = re.compile(r"\$`([^`]+)`\$")
LINK = re.compile(r"(!?\[(?:[^][]|\[[^][]*\])*\]\()(?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: object) -> object:
    """MkDocs' hook."""
    write_pages()
    return config


def write_pages() -> None:
    """Write what has changed, and remove what is no page any more."""
    wanted: dict[PurePosixPath, str | Path] = {}
    waiting = sources()
    while waiting:
        source = waiting.pop()
        place = site_path(source)
        if place in wanted:
            continue
        path = ROOT / source
        if path.suffix == ".md":
            wanted[place], linked = site_page(source, path.read_text(encoding="utf-8"))
            waiting += linked
        elif place.suffix == ".md":
            wanted[place] = shown_file(source, path.read_text(encoding="utf-8"))
        else:
            wanted[place] = path
    for place, content in wanted.items():
        _write(PAGES / place, content)
    for path in PAGES.rglob("*"):
        if path.is_file() and PurePosixPath(path.relative_to(PAGES).as_posix()) not in wanted:
            path.unlink()


def sources() -> list[PurePosixPath]:
    """The files that the site is made of, beside those that they link to."""
    paths = [
        *(path for path in (ROOT / "docs").rglob("*") if path.is_file()),
        *(ROOT / "examples").glob("**/*.md"),
        *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "THIRD_PARTY.md")),
    ]
    return [PurePosixPath(path.relative_to(ROOT).as_posix()) for path in sorted(paths)]


def site_path(source: PurePosixPath) -> PurePosixPath:
    """Where a file of the repository stands on the site."""
    if source.parts[0] == "docs":
        return PurePosixPath(*source.parts[1:])
    if source in READMES:
        return PurePosixPath(f"index{''.join(source.suffixes)}")
    if source.suffix == ".md":
        return PurePosixPath(str(source).lower() if len(source.parts) == 1 else source)
    if source.suffix in (".svg", ".png"):
        return source
    # Not start.sh.md, which would be the translation of start.md to Serbo-Croatian.
    return PurePosixPath("files", *source.parent.parts, f"{source.name.replace('.', '-')}.md")


def site_page(source: PurePosixPath, text: str) -> tuple[str, list[PurePosixPath]]:
    """A page's text for the site, and the files that it links to."""
    linked: list[PurePosixPath] = []

    def link(match: re.Match[str]) -> str:
        target = ROOT / source.parent / match[2]
        if not target.exists():
            raise FileNotFoundError(f"{source} links to {match[2]}, which is no file")
        path = PurePosixPath(os.path.relpath(target.resolve(), ROOT))
        if target.is_dir():
            raise IsADirectoryError(f"{source} links to {match[2]}: name a file of this folder")
        if path.parts[0] != "docs" and path not in READMES:
            linked.append(path)
        # On the site a page has one name in all languages: the reader's language picks the file.
        untranslated = path.with_name(path.name.replace(".zh.md", ".md"))
        place = os.path.relpath(site_path(untranslated), site_path(source).parent)
        return f"{match[1]}{place}{match[3] or ''})"

    def prose(part: str) -> str:
        return LINK.sub(link, INLINE_MATH.sub(lambda match: mathml(match[1]), part))

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts.append(prose(text[end : fence.start()]))
        is_formula = fence[3] == "math"
        parts.append(mathml(fence[4], is_block=True) if is_formula else fence[0])
        end = fence.end()
    return "".join([*parts, prose(text[end:])]), linked


def mathml(formula: str, is_block: bool = False) -> str:
    """On one line, and without a character that Markdown would read."""
    markup: str = convert(formula.strip(), display="block" if is_block else "inline")
    markup = UPRIGHT.sub(lambda match: f"<mi>{re.sub('<[^>]*>', '', match[0])}</mi>", markup)
    for character in "*_|`":
        markup = markup.replace(character, f"&#{ord(character)};")
    return f'<div class="formula">{markup}</div>' if is_block else markup


def shown_file(source: PurePosixPath, text: str) -> str:
    """A page that shows a file of the repository."""
    extension = source.suffix.removeprefix(".")
    language = LANGUAGES.get(extension, extension) if extension else "text"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    heading = f"---\nsearch:\n  exclude: true\n---\n\n# {source.name}\n\n`{source}`\n\n"
    return f"{heading}{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _write(path: Path, content: str | Path) -> None:
    """Only where it changes something: `mkdocs serve` builds again whatever was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.read_bytes() if isinstance(content, Path) else content.encode()
    if path.is_file() and path.read_bytes() == data:
        return
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_bytes(data)


if __name__ == "__main__":
    write_pages()
