"""Rows a second of `caldera data prepare` with its length filter, against the plain loop.

    python benchmarks/data_prepare.py --tokenizer PATH              # 100,000 rows, a process a core
    python benchmarks/data_prepare.py --tokenizer PATH --processes 1

The questions are those of the raw folder (the tests' slice of GSM8K unless --raw names another),
repeated under numbers of their own until there are enough. The plain loop, in one process, makes
the same rows out of a part of them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from caldera.data import hf_tokenizer
from caldera.data.prepare import LengthLimit, prepare
from caldera.data.prepare.mathematics import INSTRUCTION

SLICE = Path(__file__).parents[1] / "tests/data/raw/gsm8k"


def write_raw_rows(source: Path, rows: int, folder: Path) -> None:
    lines = (source / "train.jsonl").read_text(encoding="utf-8").splitlines()
    with (folder / "train.jsonl").open("w", encoding="utf-8") as opened:
        for number, line in enumerate(islice(cycle(lines), rows)):
            raw = json.loads(line)
            raw["question"] = f"Problem {number}. {raw['question']}"
            opened.write(json.dumps(raw) + "\n")


def plain_loop(raw_file: Path, rows: int, tokenizer: Any, longest: int, file: Path) -> int:
    """What one would write by hand; returns how many rows were kept."""
    kept: list[dict[str, Any]] = []
    with raw_file.open(encoding="utf-8") as opened:
        for index, line in enumerate(islice(opened, rows)):
            raw = json.loads(line)
            prompt = [{"role": "user", "content": f"{raw['question']} {INSTRUCTION}"}]
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=False
            )
            if len(ids) > longest:
                continue
            answer = raw["answer"].rpartition("#### ")[2].replace(",", "")
            kept.append(
                {
                    "data_source": "openai/gsm8k",
                    "prompt": prompt,
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": answer},
                    "extra_info": {"split": "train", "index": index, **raw},
                }
            )
    pq.write_table(pa.Table.from_pylist(kept), file)
    return len(kept)


def measure(what: str, rows: int, work: Callable[[], object]) -> None:
    """Time on the clock, and time that the processes of this program were computing."""
    before, start = os.times(), time.perf_counter()
    work()
    taken, after = time.perf_counter() - start, os.times()
    busy = sum(after[:4]) - sum(before[:4])
    print(f"{what:28} {taken:6.1f} s {rows / taken:8,.0f} rows/s {busy:6.1f} s of processor time")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer")
    parser.add_argument("--raw", type=Path, default=SLICE, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--plain-rows", type=int, default=10_000, help="of the plain loop")
    parser.add_argument("--max-prompt-length", type=int, default=256)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    tokenizer = hf_tokenizer(options.tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["CALDERA_CACHE"] = str(folder / "cache")
        raw, longest = folder / "raw", options.max_prompt_length
        raw.mkdir()
        write_raw_rows(options.raw, options.rows, raw)
        limit = LengthLimit(tokenizer, longest, options.processes)

        def prepare_all() -> None:
            prepare("gsm8k", raw=raw, output=folder / "out", length_limit=limit)

        measure(f"prepare, {options.processes} processes", options.rows, prepare_all)
        measure("again, lengths from cache", options.rows, prepare_all)
        part = min(options.plain_rows, options.rows)
        file = folder / "plain.parquet"
        measure(
            f"plain loop over {part:,}",
            part,
            lambda: plain_loop(raw / "train.jsonl", part, tokenizer, longest, file),
        )
        ours = pq.read_table(folder / "out/train.parquet").to_pylist()
        plain = pq.read_table(file).to_pylist()
        assert ours[: len(plain)] == plain, "the two ways do not make the same rows"


if __name__ == "__main__":
    main()
