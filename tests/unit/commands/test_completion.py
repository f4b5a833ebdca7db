"""Completion, in a real bash."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from caldera.cli import COMMANDS, main

COMPLETE = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
_caldera
((${#COMPREPLY[@]})) && printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "caldera.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script: Path, line: str, folder: Path, setup: str = "") -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", setup + COMPLETE, "bash", str(script), line],
        cwd=folder, text=True, capture_output=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("caldera tr", ["train"]),
        ("caldera train algorithm.adv", ["algorithm.adv_estimator="]),
        ("caldera train a=1 algorithm.adv_estimator=rl", ["rloo", "rloo_vectorized"]),
        ("caldera train data.shuffle=", ["true", "false"]),
        ("caldera train --cf", ["--cfg"]),
        ("caldera train --cfg ", ["job", "short"]),
        ("caldera train --cfg s", ["short"]),
        ("caldera eval --cfg ", ["job"]),
        ("caldera sft data.multiturn.me", ["data.multiturn.messages_key="]),
        ("caldera merge ", ["merge", "test"]),
        ("caldera merge test --adapter k", ["keep"]),
        ("caldera sandbox s", ["serve"]),
        ("caldera data prepare --max", ["--max-prompt-length"]),
        ("caldera completion z", ["zsh"]),
        ("caldera train data.train_files=tr", ["train.parquet"]),
        ("caldera report r", ["run"]),
        ("caldera nonsense x", []),
    ],
)  # fmt: skip
def test_words(script: Path, tmp_path: Path, line: str, expected: list[str]) -> None:
    (tmp_path / "train.parquet").touch()
    (tmp_path / "run").mkdir()
    assert completed(script, line, tmp_path) == expected


def test_all_commands(script: Path, tmp_path: Path) -> None:
    assert completed(script, "caldera ", tmp_path) == list(COMMANDS)


def test_refused_keys_are_not_offered(script: Path, tmp_path: Path) -> None:
    assert completed(script, "caldera train data.use_sh", tmp_path) == []


def test_where_words_are_not_cut_at_equals_signs(script: Path, tmp_path: Path) -> None:
    line = "caldera train data.shuffle=t"
    found = completed(script, line, tmp_path, setup='COMP_WORDBREAKS=" "\n')
    assert found == ["data.shuffle=true"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_words(shell: str, capsys: Any) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("algorithm.adv_estimator", "grpo_passk", "doctor", "job short"):
        assert word in script
    assert "@" not in script.replace("$@", "") and "{keys}" not in script


def test_every_command_has_a_help(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in told and command.help.partition(":")[0][:20] in told
