"""Small programs in the sandbox against a new interpreter for each.

    python benchmarks/sandbox.py                       # 400 programs, 2 slots

The peer, in the same run, is `subprocess.run([python, "-I", file])` from as many threads: no
isolation and no limits at all.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from caldera.sandbox import Limits, Sandbox
from caldera.sandbox.isolation import Method, find_interpreter, slot_user

PROGRAM = """
import math
from collections import Counter


def divisors(n):
    return [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]


n = int(input())
print(n, len(divisors(n)), Counter(str(n)).most_common(1)[0][1])
"""
FUNCTION = PROGRAM.partition("\n\n\nn = ")[0]
REPETITIONS = 3


def rate(name: str, work: Callable[[int], bool], programs: int, threads: int) -> float:
    """Programs a second, the best of a few rounds: other work on the machine only slows it."""
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPETITIONS):
            start = time.perf_counter()
            right = list(pool.map(work, range(1, programs + 1)))
            rates.append(programs / (time.perf_counter() - start))
            if not all(right):
                raise SystemExit(f"{name}: {right.count(False)} programs went wrong")
    shown = ", ".join(f"{value:.0f}" for value in sorted(rates))
    print(f"{name:28s} | {max(rates):8.0f} programs/s | rounds {shown}")
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()
    programs, slots = arguments.programs, arguments.slots
    interpreter = find_interpreter(None, slot_user(0)).path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "main.py"
        path.write_text(PROGRAM, encoding="utf-8")

        def alone(n: int) -> bool:
            command = [interpreter, "-I", str(path)]
            done = subprocess.run(command, input=f"{n}\n", text=True, capture_output=True)
            return done.stdout.startswith(f"{n} ")

        peer = rate("subprocess.run, unprotected", alone, programs, slots)
    methods: tuple[Method, ...] = ("bubblewrap", "namespaces")
    for method in methods:
        with Sandbox(Limits(), slots, isolation=method) as sandbox:
            run = rate(
                f"{method}: run",
                lambda n, box=sandbox: box.run(PROGRAM, f"{n}\n").stdout.startswith(f"{n} "),
                programs,
                slots,
            )
            check = rate(
                f"{method}: check",
                lambda n, box=sandbox: box.check(FUNCTION, f"assert divisors({n})[0] == 1").ok,
                programs,
                slots,
            )
        print(f"  speed of subprocess.run = 1: run {run / peer:.2f}, check {check / peer:.2f}")


if __name__ == "__main__":
    main()
