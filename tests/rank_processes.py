"""Ranks of a test file: processes that run the file again, and write down what they find.

The file ends with `if __name__ == "rank": run_rank(RANK, FOLDER, ...)`, and `run_rank` leaves
`FOLDER/found_{RANK}.pt`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import runpy
from pathlib import Path
from typing import Any

import torch


def run_ranks(file: str, ranks: int, folder: Path, preload: str, **given: Any) -> list[Any]:
    """What each of so many ranks has found; `given` are further names that the file knows there.

    `preload` is what the processes share besides torch and transformers, so that they start soon.
    The first that fails ends the others, which would wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", preload])
    processes = [
        context.Process(
            target=runpy.run_path,
            args=(file, {"RANK": rank, "FOLDER": folder, **given}),
            kwargs={"run_name": "rank"},
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    while not any(one.exitcode for one in processes) and any(one.is_alive() for one in processes):
        multiprocessing.connection.wait([one.sentinel for one in processes if one.is_alive()])
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    return [torch.load(folder / f"found_{rank}.pt", weights_only=False) for rank in range(ranks)]
