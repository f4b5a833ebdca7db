"""The commit gate: subjects say kind, place and behaviour, as CONTRIBUTING.md asks.

Usage: python scripts/check_commits.py [REPOSITORY]

Reads the subjects since the rule holds, prints each that breaks it and exits with status 1 if there
is any. Without that history, as in a shallow clone or an archive, there is nothing to check.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SINCE = "d0c01ad"
"""The last commit before the rule."""
KINDS = ("feat", "fix", "perf", "refactor", "test", "docs", "build", "ci", "chore")
SUBJECT = re.compile(rf"(?:{'|'.join(KINDS)})(?:\([a-z0-9_/., -]+\))?!?: \S")


def offences(subjects: Iterable[str]) -> Iterator[str]:
    """The subjects that break the rule; merges have git's own."""
    for subject in subjects:
        if not subject.startswith("Merge ") and not SUBJECT.match(subject):
            yield subject


def subjects_since(root: Path, commit: str) -> list[str]:
    """The subjects of later commits; none where the history is not there."""
    command = ["git", "-C", str(root), "log", "--format=%s", f"{commit}..HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).parent.parent
    found = list(offences(subjects_since(root, SINCE)))
    for subject in found:
        print(
            f"commit subject {subject!r}: takes kind(place): behaviour; kinds: {', '.join(KINDS)}"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
