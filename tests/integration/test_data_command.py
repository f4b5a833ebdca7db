"""`caldera data`: from raw files to batches, and what is said of wrong options."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

RAW = Path(__file__).parents[1] / "data/raw"
MAX_PROMPT_LENGTH = 400  # characters: the lab's tokenizer has one token for each


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """The entry point sets a level for its process, which here is the tests'."""
    own = logging.getLogger("caldera")
    level = own.level
    yield
    own.setLevel(level)


def caldera(lab: Lab, *arguments: object) -> subprocess.CompletedProcess[str]:
    return lab.run(list(map(str, arguments)), "caldera.cli", COLUMNS="200")


def test_from_raw_files_to_batches(lab: Lab, tmp_path: Path) -> None:
    options = ["--tokenizer", lab.model, "--max-prompt-length", MAX_PROMPT_LENGTH]
    # --local_dir is verl's spelling of --output.
    done = caldera(
        lab, "data", "prepare", "gsm8k", "--raw", RAW / "gsm8k", "--local_dir", tmp_path, *options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"

    from caldera.config import DataConfig
    from caldera.data import RLHFDataset, create_train_loader, hf_tokenizer

    config = DataConfig(
        train_files=[str(train)],
        val_files=[str(test)],
        seed=1,
        train_batch_size=4,
        max_prompt_length=MAX_PROMPT_LENGTH,
        dataloader_num_workers=0,
    )
    dataset = RLHFDataset(str(train), hf_tokenizer(str(lab.model)), config)
    assert 4 <= len(dataset) < 24, "some of the prompts are too long, and some are not"
    batch = next(iter(create_train_loader(dataset, config)))
    assert batch["input_ids"].shape == (4, MAX_PROMPT_LENGTH)
    assert set(batch["data_source"]) == {"openai/gsm8k"}
    raw = [json.loads(line) for line in (RAW / "gsm8k/train.jsonl").read_text().splitlines()]
    for index, model in zip(batch["index"], batch["reward_model"], strict=True):
        assert raw[index]["answer"].endswith(f"#### {model['ground_truth']}")

    fine = caldera(lab, "data", "check", train, "--against", test, "--tokenizer", lab.model)
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert "caldera.reward_score.gsm8k.compute_score" in fine.stdout
    assert "tokens of a prompt" in fine.stdout
    leaking = caldera(lab, "data", "check", test, "--against", test)
    assert leaking.returncode == 1, leaking.stdout + leaking.stderr
    assert "10 rows with prompts that are in" in leaking.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "gsm8k", "--raw", "nowhere"], "--raw=nowhere: there is no such folder"),
        (["prepare", "gsm9k", "--raw", "."], "unknown data set 'gsm9k'; did you mean 'gsm8k'?"),
        (["prepare", "gsm8k"], "give either --raw FOLDER, with the raw files, or --hub"),
        (
            ["prepare", "gsm8k", "--raw", ".", "--tokenizer", "./no", "--max-prompt-length", "9"],
            "--tokenizer='./no': the folder no does not exist",
        ),
        (
            ["prepare", "gsm8k", "--raw", ".", "--max-prompt-length", "9"],
            "--tokenizer and --max-prompt-length only work together",
        ),
        (["check", "no.parquet"], "FILE: no.parquet does not exist"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    from caldera.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"caldera: error: {message}")
    assert len(told.splitlines()) == 1


def test_the_list_of_commands_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom caldera.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "prepare public data sets" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
