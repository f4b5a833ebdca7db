"""Subjects of commits are checked by kind, place and behaviour."""

from __future__ import annotations

import subprocess
from pathlib import Path

from scripts.check_commits import offences, subjects_since


def test_kind_place_and_behaviour() -> None:
    fine = [
        "fix(data): left padding keeps the end of a long prompt",
        "feat(rollout, config)!: stop strings are keys",
        "docs: a page about extending",
        "Merge branch 'main'",
    ]
    odd = ["Fixed things", "fix:no space", "feature(data): x", "fix(Data): x", "wip"]
    assert list(offences([*fine, *odd])) == odd


def test_a_history_is_read_from_a_commit_on(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    for subject in ("first", "second", "third"):
        git("commit", "-q", "--allow-empty", "-m", subject)
    first = git("rev-list", "--max-parents=0", "HEAD")
    assert subjects_since(tmp_path, first) == ["third", "second"]
    assert subjects_since(tmp_path, "0" * 40) == []
    assert subjects_since(tmp_path / "nowhere", first) == []
