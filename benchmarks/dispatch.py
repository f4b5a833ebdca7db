"""The controller's own overhead: a batch goes to the ranks of a group, and an answer comes back.

    python benchmarks/dispatch.py                      # 1,024 rows x 4,096 tokens, 2 local ranks
    python benchmarks/dispatch.py --ray                # on Ray as well

The peer, in the same run, is what one would write by hand: a pipe to each process, tensors pickled.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)

NEEDED = ("input_ids", "attention_mask", "responses", "response_mask", "old_log_probs")


class Echo(Worker):
    """Answers as `compute_log_prob` does: two float tensors of the responses' shape."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def everything(self, data: DataProto) -> DataProto:
        return answer_of(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, needs=NEEDED)
    def needed(self, data: DataProto) -> DataProto:
        return answer_of(data)


def answer_of(data: DataProto) -> DataProto:
    log_probs = tensors_of(data)["old_log_probs"]
    return DataProto.from_dict(
        {"log_probs": log_probs + 1, "entropys": log_probs + 2},
        meta_info={"metrics": {"mebibytes": mebibytes(data)}},  # what has arrived
    )


def usual_batch(rows: int, tokens: int) -> DataProto:
    """The keys of a batch before its update; half of the tokens are the response's."""
    half = tokens // 2
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    response = torch.zeros(rows, half, dtype=torch.int64)
    floats = torch.zeros(rows, half)
    tensors = {
        "prompts": response,
        "responses": response.clone(),
        "input_ids": ids,
        "attention_mask": ids.clone(),
        "position_ids": ids.clone(),
        "response_mask": response.clone(),
    }
    names = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
    return DataProto.from_dict(tensors | {name: floats.clone() for name in names})


def mebibytes(data: DataProto) -> float:
    return sum(value.nbytes for value in tensors_of(data).values()) / 2**20


def seconds(call: Callable[[], object], repetitions: int) -> float:
    call()  # the first call makes buffers
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def by_hand(end: Connection) -> None:
    """The peer's process."""
    while (message := end.recv_bytes()) != b"":
        tensors = pickle.loads(message)
        log_probs = tensors["old_log_probs"]
        end.send_bytes(pickle.dumps({"log_probs": log_probs + 1, "entropys": log_probs + 2}))


def peer(batch: DataProto, ranks: int, repetitions: int) -> float:
    """Seconds of the same round trip through pickles and pipes."""
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [context.Process(target=by_hand, args=(child,), daemon=True) for _, child in pipes]
    for process in processes:
        process.start()

    def round_trip() -> dict[str, torch.Tensor]:
        for (end, _), part in zip(pipes, batch.chunk(ranks), strict=True):
            # A view would be pickled with the storage of the whole batch.
            end.send_bytes(pickle.dumps({k: v.clone() for k, v in tensors_of(part).items()}))
        answers = [pickle.loads(end.recv_bytes()) for end, _ in pipes]
        return {key: torch.cat([answer[key] for answer in answers]) for key in answers[0]}

    took = seconds(round_trip, repetitions)
    for (end, _), process in zip(pipes, processes, strict=True):
        end.send_bytes(b"")
        process.join()
    return took


def report(name: str, took: float, moved: float, reference: float) -> None:
    print(
        f"{name:34s} | {took * 1000:9.1f} ms | {moved:8.1f} MiB | {moved / took / 1024:6.2f} GiB/s "
        f"| {reference / took:5.2f}"
    )


def measure(
    name: str, group: WorkerGroup, batch: DataProto, repetitions: int, peer_s: float
) -> None:
    """Time both methods, after seeing that what they declare arrives, and nothing else."""
    declared = batch.select(list(NEEDED))
    for what, method, sent in (
        ("all keys", group.everything, batch),
        ("keys that are needed", group.needed, declared),
    ):
        answer = method(batch)
        arrived = sum(answer.meta_info["metrics"]["mebibytes"])
        if arrived != mebibytes(sent):
            raise SystemExit(f"{name}: {mebibytes(sent)} MiB were to be sent, {arrived} arrived")
        took = seconds(lambda method=method: method(batch), repetitions)
        report(f"{name}, {what}", took, arrived + mebibytes(answer), peer_s)


def measure_on_ray(batch: DataProto, ranks: int, repetitions: int, peer_s: float) -> None:
    """On a cluster of its own, which ends with the measurement."""
    import ray

    from caldera.single_controller.ray_group import RayWorkerGroup
    from caldera.single_controller.ray_pool import RayResourcePool

    ray.init("local", num_cpus=ranks, include_dashboard=False, log_to_driver=False)
    pool = RayResourcePool([ranks], use_gpu=False)
    group = RayWorkerGroup(pool, ClassWithInitArgs(Echo), name="echo")
    measure("Ray", group, batch, repetitions, peer_s)
    group.shutdown()
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="measure Ray as well")
    arguments = parser.parse_args()
    batch = usual_batch(arguments.rows, arguments.tokens)
    back = mebibytes(answer_of(batch))
    pool = ResourcePool([arguments.ranks])
    print(f"{arguments.rows} rows x {arguments.tokens} tokens to {arguments.ranks} ranks and back")
    print(f"{'':34s} |      time    |    moved     |  moved/time  | speed of the peer = 1")
    peer_s = peer(batch, arguments.ranks, arguments.repetitions)
    report("pickles through pipes, all keys", peer_s, mebibytes(batch) + back, peer_s)
    local = LocalWorkerGroup(pool, ClassWithInitArgs(Echo), "echo")
    measure("local", local, batch, arguments.repetitions, peer_s)
    local.shutdown()
    if arguments.ray:
        measure_on_ray(batch, arguments.ranks, arguments.repetitions, peer_s)


if __name__ == "__main__":
    main()
