"""Write the recorded cases anew.

Usage: python tests/reference/record.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recording import advantages, corrections, losses

HERE = Path(__file__).parent


def record(folder: Path) -> list[Path]:
    """One file a function. A family of several has its name in front: `gpg` is in two."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for file in (*advantages.files(), *losses.files(), *corrections.files()):
        several = file.family != file.function
        stem = f"{file.family}_{file.function}" if several else file.function
        path = folder / f"{stem}.json"
        aside = path.with_suffix(".json.part")
        aside.write_text(file.text(), encoding="utf-8")
        aside.replace(path)
        written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the recorded cases anew.")
    parser.add_argument("--output", type=Path, default=HERE / "cases")
    print(f"{len(record(parser.parse_args().output))} files written")


if __name__ == "__main__":
    main()
