"""The task: `prepare.py FOLDER` writes prompts and preference pairs there.

Prompts are the sums of two numbers from 20 to 29. A pair has the right result and a wrong one: near
it, or a number, or a few characters of the model's vocabulary, at random. One pair in five is held
out.

    train.parquet, test.parquet           rows of verl's schema, for PPO and its validation
    pairs_train.jsonl, pairs_test.jsonl   pairs, for the reward model
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from caldera.demo.arithmetic import write_parquet

SMALLEST, LARGEST = 20, 29
PAIRS = 60  # of a prompt


def main(folder: Path) -> None:
    draw = random.Random(0)
    numbers = range(SMALLEST, LARGEST + 1)
    problems = [(f"{a}+{b}", str(a + b)) for a in numbers for b in numbers]
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [
        json.dumps({"prompt": question, "chosen": right, "rejected": wrong(right, draw)}) + "\n"
        for question, right in problems
        for _ in range(PAIRS)
    ]
    draw.shuffle(pairs)
    held_out = len(pairs) // 5
    for split, part in (("train", pairs[held_out:]), ("test", pairs[:held_out])):
        (folder / f"pairs_{split}.jsonl").write_text("".join(part))
        write_parquet(problems, split, folder / f"{split}.parquet")


def wrong(right: str, draw: random.Random) -> str:
    """A wrong response."""
    found = right
    while found == right:
        near = str(int(right) + draw.choice([-10, -2, -1, 1, 2, 10]))
        characters = "".join(draw.choices("0123456789+=", k=draw.randint(0, 3)))
        found = draw.choice([near, near, str(draw.randint(2 * SMALLEST, 2 * LARGEST)), characters])
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
