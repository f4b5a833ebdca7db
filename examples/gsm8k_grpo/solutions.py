"""Write GSM8K's solutions as SFT data: `solutions.py FOLDER` adds sft_{train,test}.parquet there.

FOLDER has the files of `caldera data prepare gsm8k`. The prompts stay as they are, so that the
supervised model starts GRPO on prompts that it has seen; the calculator's notes are cut:
`48/2 = <<48/2=24>>24` becomes `48/2 = 24`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main(folder: Path) -> None:
    for split in ("train", "test"):
        rows = [
            {
                "question": row["prompt"][-1]["content"],
                "answer": re.sub(r"<<[^>]*>>", "", row["extra_info"]["answer"]),
            }
            for row in pq.read_table(folder / f"{split}.parquet").to_pylist()
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"sft_{split}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
