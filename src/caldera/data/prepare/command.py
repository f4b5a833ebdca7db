"""`caldera data prepare` and `caldera data check`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from caldera.data.chat import hf_tokenizer
from caldera.data.prepare.check import FindScorer, check_file, check_tables
from caldera.data.prepare.preparer import PREPARERS
from caldera.data.prepare.run import LengthLimit, prepare
from caldera.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBLEMS_FOUND = 1
PREPARE_HELP = """\
Make parquet files of a public data set, in the rows that training takes. It is
read from files that you have (--raw), or from the Hugging Face hub (--hub).

  caldera data prepare gsm8k --hub
  caldera data prepare gsm8k --raw downloads/gsm8k --output data/gsm8k
"""
CHECK_HELP = """\
Show what is in a data file, and what is wrong with it: columns, sources and their
scorers, lengths, duplicates. Ends with status 1 if something is wrong.

  caldera data check data/gsm8k/train.parquet --against data/gsm8k/test.parquet
"""


def run(options: argparse.Namespace, find_scorer: FindScorer) -> int:
    """Do what is asked for; returns the exit status."""
    if options.command == "check":
        return 0 if _check(options, find_scorer) else PROBLEMS_FOUND
    _prepare(options)
    return 0


def _prepare(options: argparse.Namespace) -> None:
    name: str = options.name
    PREPARERS[name]  # a wrong name is reported before a wrong folder
    if options.hub == (options.raw is not None):
        raise DataError("give either --raw FOLDER, with the raw files, or --hub")
    prepare(
        name,
        raw=options.raw,
        output=options.output or Path("data") / name,
        length_limit=_length_limit(options),
        limit=options.limit,
    )


def _length_limit(options: argparse.Namespace) -> LengthLimit | None:
    if (options.tokenizer is None) != (options.max_prompt_length is None):
        raise DataError("--tokenizer and --max-prompt-length only work together: give both")
    if options.tokenizer is None:
        return None
    return LengthLimit(_tokenizer(options.tokenizer), options.max_prompt_length, options.processes)


def _check(options: argparse.Namespace, find_scorer: FindScorer) -> bool:
    """Show what is in the file; whether it is in order."""
    check = check_file(
        options.file,
        find_scorer=find_scorer,
        tokenizer=None if options.tokenizer is None else _tokenizer(options.tokenizer),
        processes=options.processes,
        against=options.against,
    )
    Console().print(check_tables(check))
    return not check.problems


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    tokenizer = hf_tokenizer(path, key="--tokenizer")
    if tokenizer.chat_template is None:
        raise DataError(f"--tokenizer={path!r}: the tokenizer has no chat template")
    return tokenizer


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    whole = argparse.ArgumentParser(prog="caldera data", description="Data sets to train on.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    _add_prepare(commands)
    _add_check(commands)
    return whole


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    prepare = commands.add_parser(
        "prepare",
        help="make parquet files of a public data set",
        description=PREPARE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.add_argument("name", metavar="NAME", help=", ".join(PREPARERS))
    prepare.add_argument(
        "--raw", type=Path, metavar="FOLDER", help="folder with the files as they were published"
    )
    prepare.add_argument("--hub", action="store_true", help="download from the Hugging Face hub")
    prepare.add_argument(
        "--output",
        "--local_dir",
        "--local_save_dir",
        type=Path,
        metavar="FOLDER",
        help="folder to write to (data/NAME)",
    )
    prepare.add_argument(
        "--max-prompt-length", type=_positive, metavar="N", help="drop prompts of more tokens"
    )
    prepare.add_argument(
        "--limit", type=_positive, metavar="N", help="take the first N rows of each split"
    )
    _add_tokenizer(prepare)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="show what is in a data file, and what is wrong",
        description=CHECK_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("file", metavar="FILE", help="parquet, JSON or JSON lines")
    check.add_argument("--against", metavar="OTHER", help="file that must share no prompt with it")
    _add_tokenizer(check)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="measure prompts with this model's chat template"
    )
    parser.add_argument(
        "--processes",
        type=_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="measure in so many processes (one a core)",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
