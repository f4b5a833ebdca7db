"""DataProto beside a plain TensorDict: time, bytes copied and peak memory of each operation.

    python benchmarks/dataproto.py [--rows 4096] [--tokens 8192] [--prompt-tokens 2048]
        [--repetitions 3] [--threads 1]

Both do the same with the same tensors, those of a training step; the DataProto takes its object
arrays and meta information along, the TensorDict has none. "copied" are the bytes of the result's
tensors and arrays whose storage is none of the inputs'. "extra" is how far the process grew beyond
its size before the operation (Linux only). The ratio is DataProto's time over TensorDict's.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from caldera import DataProto

MIB = 1024**2
FLOAT_KEYS = (
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "values",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
)
ADDED = ("values", "advantages", "returns")
"""What the benchmark of union adds to the other keys."""
HALF = ("input_ids", "attention_mask", "position_ids", "responses", "old_log_probs", "advantages")


Operation = Callable[[], Any]


@dataclass(frozen=True)
class Measured:
    seconds: float
    copied: int
    extra: int | None


def build_tensors(rows: int, tokens: int, prompt_tokens: int) -> dict[str, torch.Tensor]:
    """The keys of a step with a critic and a reference; written to, so that memory is taken."""
    response_tokens = tokens - prompt_tokens
    widths = {"prompts": prompt_tokens, "responses": response_tokens}
    widths |= dict.fromkeys(("input_ids", "attention_mask", "position_ids"), tokens)
    widths["response_mask"] = response_tokens
    integers = {key: torch.ones(rows, width, dtype=torch.int64) for key, width in widths.items()}
    return integers | {key: torch.ones(rows, response_tokens) for key in FLOAT_KEYS}


def build_columns(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    columns = {key: np.empty(rows, object) for key in ("uid", "data_source", "reward_model")}
    for row in range(rows):
        columns["uid"][row] = f"train-0-{row}"
        columns["data_source"][row] = "benchmark"
        columns["reward_model"][row] = {"ground_truth": str(row), "style": "rule"}
    return columns | {"index": np.arange(rows)}


def storages(parts: Iterable[Any]) -> dict[int, int]:
    """Address and bytes of every storage behind DataProtos and TensorDicts."""
    found: dict[int, int] = {}
    for part in parts:
        batch: Any = part.batch if isinstance(part, DataProto) else part
        for tensor in batch.values():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        for column in part.non_tensor_batch.values() if isinstance(part, DataProto) else ():
            whole = column if column.base is None else column.base
            found[whole.ctypes.data] = whole.nbytes
    return found


def measure(operations: list[Operation], inputs: list[Any], repetitions: int) -> list[Measured]:
    """Of each operation the best time; in turns, so that what else the machine does hits all."""
    runs = [[run(operation, inputs) for operation in operations] for _ in range(repetitions)]
    return [
        min(of_one, key=lambda measured: measured.seconds) for of_one in zip(*runs, strict=True)
    ]


def run(operation: Operation, inputs: list[Any]) -> Measured:
    """One run: its time, and what its result does not share with the inputs."""
    gc.collect()
    before = reset_peak()
    start = time.perf_counter()
    result = operation()
    seconds = time.perf_counter() - start
    peak = memory("VmHWM")
    of_inputs = storages(inputs)
    new = storages(result if isinstance(result, list | tuple) else [result])
    copied = sum(size for address, size in new.items() if address not in of_inputs)
    return Measured(
        seconds, copied, None if peak is None or before is None else max(peak - before, 0)
    )


def memory(field: str) -> int | None:
    """A line of the process's status, in bytes."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def reset_peak() -> int | None:
    """Forget the process's peak memory; its present one."""
    forget = Path("/proc/self/clear_refs")
    if not forget.exists():
        return None
    forget.write_text("5")
    return memory("VmRSS")


def reorder(holder: list[Any], order: torch.Tensor) -> list[Any]:
    """In place, as far as it can be: the holder alone may have the batch."""
    if isinstance(holder[0], DataProto):
        holder[0].reorder(order)
    else:
        holder[0] = holder[0][order]
    return holder


def run_reorder(holder: list[Any], order: torch.Tensor, repetitions: int) -> Measured:
    return measure([partial(reorder, holder, order)], [], repetitions)[0]


def operations(
    data: DataProto, batch: TensorDict
) -> Iterator[tuple[str, list[Any], list[Operation]]]:
    """Name, inputs, the operation of the DataProto and the TensorDict's that does the same."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    counts = torch.arange(len(data)) % 3
    by_count = torch.arange(len(data)).repeat_interleave(counts)
    rest = [str(key) for key in batch.keys() if key not in ADDED]  # noqa: SIM118, not over rows
    data_parts, batch_parts = data.chunk(8), batch.chunk(8)
    left, right = data.select(rest), data.select([*rest, *ADDED], [], [])
    copy = data.select(["old_log_probs"], ["uid"], deepcopy=True)
    tensor_left, tensor_right = batch.select(*rest), batch.select(*rest, *ADDED)
    tensor_copy = batch.select("old_log_probs").clone()

    def compared_update() -> TensorDict:
        assert torch.equal(tensor_left["old_log_probs"], tensor_copy["old_log_probs"])
        return tensor_left.copy().update(tensor_copy)

    pairs: dict[str, tuple[Operation, Operation]] = {
        "select half of the keys": (lambda: data.select(HALF), lambda: batch.select(*HALF)),
        "slice": (lambda: data[8:-8], lambda: batch[8:-8]),
        "chunk into 8": (lambda: data.chunk(8), lambda: batch.chunk(8)),
        "split by 64": (lambda: data.split(64), lambda: batch.split(64)),
        "union, same memory": (
            lambda: left.select().union(right),
            lambda: tensor_left.copy().update(tensor_right),
        ),
        "union, one equal copy": (lambda: left.select().union(copy), compared_update),
        "concat of 8": (
            lambda: DataProto.concat(data_parts),
            lambda: TensorDict.cat(batch_parts, 0),
        ),
        "repeat 2, interleaved": (
            lambda: data.repeat(2),
            lambda: batch.repeat_interleave(2, dim=0),
        ),
        "repeat 2": (lambda: data.repeat(2, interleave=False), lambda: batch.repeat(2)),
        "sample_level_repeat": (
            lambda: data.sample_level_repeat(counts),
            lambda: batch[by_count],
        ),
        "select_idxs": (lambda: data[order], lambda: batch[order]),
    }
    for name, pair in pairs.items():
        yield name, [data, batch, copy, tensor_copy], list(pair)


def show(name: str, own: Measured, plain: Measured) -> None:
    cells = [f"{name:24s}"]
    for measured in (own, plain):
        extra = "-" if measured.extra is None else f"{measured.extra / MIB:.0f}"
        cells += [f"{measured.seconds * 1e3:10.2f}{measured.copied / MIB:10.1f}{extra:>8s}"]
    sys.stdout.write(" |".join(cells) + f" |{own.seconds / plain.seconds:7.2f}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="divisible by 64")
    parser.add_argument("--tokens", type=int, default=8192, help="of prompt and response")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tensors = build_tensors(arguments.rows, arguments.tokens, arguments.prompt_tokens)
    size = sum(tensor.nbytes for tensor in tensors.values())
    sys.stdout.write(
        f"{arguments.rows} rows, {arguments.tokens} tokens ({arguments.prompt_tokens} of the "
        f"prompt), {len(tensors)} tensors of {size / MIB:.0f} MiB in all; best of "
        f"{arguments.repetitions}, {arguments.threads} thread(s)\n"
        f"{'':24s} |{'DataProto':^28s} |{'TensorDict':^28s} | ratio\n"
        f"{'':24s}" + f" |{'ms':>10s}{'MiB copied':>11s}{'extra':>7s}" * 2 + " |\n"
    )
    columns = build_columns(arguments.rows)
    data = DataProto.from_dict(tensors, columns, {"temperature": 1.0, "global_steps": 1})
    batch = TensorDict(tensors, [arguments.rows])
    repetitions = arguments.repetitions
    for name, inputs, pair in operations(data, batch):
        show(name, *measure(pair, inputs, repetitions))
    order = torch.randperm(arguments.rows, generator=torch.Generator().manual_seed(1))
    del inputs, pair, batch
    tensors.clear()
    holder: list[Any] = [data]
    del data
    own = run_reorder(holder, order, repetitions)
    holder[0] = holder[0].batch
    show("reorder, in place", own, run_reorder(holder, order, repetitions))


if __name__ == "__main__":
    main()
