"""Fail if a page of build/site loads something from the network, or shows a formula as code.

python scripts/check_site.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SITE = Path(__file__).parents[1] / "build/site"
LOADS = re.compile(
    r"<(?:audio|embed|iframe|img|script|source|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
)
STYLE_LOADS = re.compile(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//[^)]*")
FORMULA_AS_CODE = re.compile(r"\$<code>[^<]*</code>\$|class=\"language-math[^>]*>")


def mistakes(page: str) -> list[str]:
    found = [f"loads {match[0]}" for match in LOADS.finditer(page)]
    return found + [f"a formula as code: {match[0]}" for match in FORMULA_AS_CODE.finditer(page)]


def main() -> int:
    pages = sorted(SITE.rglob("*.html"))
    found = [(path, each) for path in pages for each in mistakes(path.read_text("utf-8"))]
    for path in SITE.rglob("*.css"):
        found += [(path, f"loads {m[0]}") for m in STYLE_LOADS.finditer(path.read_text("utf-8"))]
    for path, mistake in found:
        print(f"{path.relative_to(SITE)}: {mistake}")
    print(f"{len(pages)} pages, {len(found)} mistakes")
    return bool(found) or not pages


if __name__ == "__main__":
    sys.exit(main())
