"""Launch scripts are read as bash reads them, as far as nothing has to be run."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from caldera.commands.launch_script import Script, literal, plain, quoted

RUN = 'run() { printf "%s\\0" "$@" "${HELD-}" >words; }\n'


def given_to_run(text: str, folder: Path) -> list[str]:
    """What bash gives to the command `run`, and the variable HELD."""
    subprocess.run(["bash", "-euc", RUN + text], cwd=folder, check=True)
    return (folder / "words").read_text().split("\0")[:-1]


@pytest.mark.parametrize(
    "text",
    [
        "run a=1 b='x y' c=\"x y\" d=x\\ y",
        "run a=1 \\\n  b=2 \\\n\tc=3",
        "n=3; run a=$n b=${n} c=\"$n\" d='$n' e=\\$n f=${n}x",
        "a='it is'\nrun x=\"$a\" \"y=${a}\"",
        "files=\"['/d/a.parquet', '/d/b.parquet']\"\nrun data=\"$files\"",
        "run a=1 # and no more\n",
        "# run a=1\nrun a=2 'b#c' d#e",
        "run 'a=[\"console\",\"wandb\"]' b=[x,y] c={d:1}",
        "a=$((1024 * 2)); b=$((a + 8)); run x=$a y=$((a+b)) z=$((b/3))",
        "run a=${none:-7} b=${other-8} ${third:=c=9} d=$third",
        "args=(a=1 \"b=x y\" # told\n  c=3)\nargs+=(d=4)\nrun \"${args[@]}\" e=5",
        "run a=1 > log 2>&1",
        "run a=1 2>/dev/null b=2",
        "x='a=1 b=2'; run $x c=3",
        "cat > /dev/null <<EOF\nit's not a \"quote\nEOF\nrun a=1",
        "export A=1 B=2\nrun a=$A b=$B",
        "a=x\na+=y\nrun $a",
        "run a=\"1 \\\n2\" \"b=\\\"c\\\"\" c=\"d'e'\"",
        "x='a=1 b=2'; y=''; run ${x} $y k=$x \"$y\" '' \"${x}\"",
        "x=1; unset x; run a=${x:-2}",
    ],
)  # fmt: skip
def test_it_agrees_with_bash(text: str, tmp_path: Path) -> None:
    expected = given_to_run(text, tmp_path)[:-1]
    launches = [launch.words for launch in Script(text).launches if launch.words[0] == "run"]
    assert [[plain(word) for word in words] for words in launches] == [["run", *expected]]


@pytest.mark.parametrize(
    "text",
    [
        "run a=$HOME/x b=~/x c='$HOME' d=\\$HOME \"e=\\$HOME/$HOME\"",
        "model=~/m/Qwen; name=$(basename $model)-grpo; run n=$name \"m=$(dirname \"$model\") x\"",
        "count=$(echo 2); run a=$((count * 8)) b=$(($(echo 3) + 1)) c=`pwd`/x",
        "file=/d/a.parquet; run a=${file%.parquet} b=${#file} c=${file##*/}",
        "one=$(echo 1); two=$(echo \"$one\" 2); run \"c=${two/1/3}\"",
        "files=(a 'b c'); run n=${#files[@]} f=\"${files[1]}\"",
        "export HELD=~/hf:'$x'; run 'l=${actor.lr}' \"p=[\\\"$HOME\\\"]\"",
        "P=${HOME}:x; export HELD=$P; run a=\"$P\"",
        "x=\"a=1 b=$HOME/b c=$HOME/c d=`pwd` e=$(($(echo 3) + 1))\"; run $x f=$x \"$x\"",
    ],
)  # fmt: skip
def test_what_is_left_to_a_shell_means_the_same_there(text: str, tmp_path: Path) -> None:
    """Given to bash with what it needs, each word becomes what it is in the script."""
    expected = given_to_run(text, tmp_path)
    (launch,) = Script(text).launches
    lines = [f"{name}={value}" for name, value in launch.settings.items()]
    lines += [f"export {name}={quoted(value)}" for name, value in launch.environment.items()]
    lines.append(" ".join(map(quoted, launch.words)))
    assert given_to_run("\n".join(lines), tmp_path) == expected


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("files=['a.parquet','b c']", "\"files=['a.parquet','b c']\""),
        ("it's $5", "'it'\"'\"'s $5'"),
        ("it's !1", "'it'\"'\"'s !1'"),
        ("a b", "'a b'"),
    ],
)
def test_words_are_in_the_quotes_that_are_easiest_to_read(word: str, shown: str) -> None:
    assert quoted(literal(word)) == shown
    assert shlex.split(shown) == [word]


def test_the_folder_of_the_script_is_known(tmp_path: Path) -> None:
    text = (
        'here="$( cd "$( dirname "${BASH_SOURCE[0]}" )" && pwd )"\n'
        'run a=$here b=$(dirname "$0")/x c=${BASH_SOURCE[0]}\n'
    )
    (launch,) = Script(text, f"{tmp_path}/sub/run.sh").launches
    (tmp_path / "sub").mkdir()
    found = given_to_run(" ".join(map(quoted, launch.words)), tmp_path)[:-1]
    assert found == [
        f"a={tmp_path}/sub", f"b={tmp_path}/sub/x", f"c={tmp_path}/sub/run.sh",
    ]  # fmt: skip


def test_what_only_a_shell_knows_stays_as_it_is() -> None:
    text = 'run a=$HOME/x b=$(nvidia-smi -L | wc -l) c=`pwd` d=${x%/*} e=$1 "$@" "${more[@]}"'
    script = Script(text)
    assert script.launches[0].words == [
        "run", "a=$HOME/x", "b=$(nvidia-smi -L | wc -l)", "c=`pwd`", "d=${x%/*}", "e=$1",
    ]  # fmt: skip
    assert script.notes == [
        "$HOME: only the shell knows its value",
        "$(nvidia-smi -L | wc -l): only the shell knows its value",
        "`pwd`: only the shell knows its value",
        "${x%/*}: only the shell knows its value",
        "$1: only the shell knows its value",
        '"$@": the script\'s own arguments come here',
        '"${more[@]}": not set in the script, left out',
    ]


def test_words_of_a_variable_are_told_apart_around_what_only_a_shell_knows() -> None:
    text = 'x="a=1 b=$HOME/b c=$(basename a b)"\nrun $x "$x"'
    assert Script(text).launches[0].words == [
        "run", "a=1", "b=$HOME/b", "c=$(basename a b)", "a=1 b=$HOME/b c=$(basename a b)",
    ]  # fmt: skip


def test_a_comment_amid_a_command_is_told() -> None:
    script = Script("run a=1 \\\n    # b=2 \\\n    c=3 \\\n")
    assert script.launches[0].words == ["run", "a=1", "c=3"]
    assert "line 2: a comment amid a command" in script.notes[0]


def test_the_environment_of_a_command() -> None:
    script = Script("export A=1\nB=2\nC=3 run x\nexport B\nrun y")
    assert [launch.environment for launch in script.launches] == [
        {"A": "1", "C": "3"},
        {"A": "1", "B": "2"},
    ]


def test_branches_are_told() -> None:
    script = Script("if [ $x = 1 ]; then n=2; else n=3; fi\nfor i in 1 2; do run n=$n; done")
    assert ["run", "n=3"] in [launch.words for launch in script.launches]
    assert "the script has branches or loops: each was read once, in order" in script.notes
    assert Script('[ -z "$x" ] && x=1').notes[0].startswith("the script has branches")


def test_commands_of_a_pipe_are_apart() -> None:
    assert [launch.words for launch in Script("run a 2>&1 | tee log && b; c &").launches] == [
        ["run", "a"], ["tee", "log"], ["b"], ["c"],
    ]  # fmt: skip
