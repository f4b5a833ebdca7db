"""The task: `prepare.py FOLDER` writes sums of two-digit numbers and an untrained model there.

train.parquet, test.parquet           rows of verl's schema, for reinforcement learning
sft_train.parquet, sft_test.parquet   the same sums with their results, for supervised training
model/                                a transformer of 0.4 million random parameters
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from caldera.demo.arithmetic import build_model, build_tokenizer, sums, write_parquet


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, problems in zip(("train", "test"), sums(seed=1), strict=True):
        write_parquet(problems, split, folder / f"{split}.parquet")
        pairs = [{"question": question, "answer": answer} for question, answer in problems]
        pq.write_table(pa.Table.from_pylist(pairs), folder / f"sft_{split}.parquet")
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
