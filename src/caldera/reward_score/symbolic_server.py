"""The program behind `symbolic.py`: compares expressions with math-verify, one child for each.

Reads requests from stdin and answers each with one line. A comparison runs in a fork of this
process: the libraries are loaded and warm there, and whatever a hostile expression does ends with
the child. Its limits are the operating system's (timers whose signals kill, bounded memory), so
that they hold inside C code too, where Python handles no signal.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

READY = "ready"
EQUAL, DIFFERENT, UNDECIDED = "equal", "different", "undecided"
VERDICTS = [EQUAL, DIFFERENT, UNDECIDED]  # by the exit status of the child

MEMORY_BYTES = 4 << 30
WALL_SECONDS_PER_CPU_SECOND = 20  # a machine may be busy, but not for ever
# The parser builds its tables as it goes: these fill them once, before the first fork.
WARMING = [
    r"\frac{1}{2}",
    r"-3.5",
    r"2\sqrt{3}+x^2",
    r"\left(3,\frac{\pi}{2}\right)",
    r"\{1,2\}",
    r"[0,1)\cup(2,\infty)",
    r"x=5",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"\text{yes}",
    r"10\%",
]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    logging.disable()  # math-verify warns that its own time limits are off: ours are below
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not answer
    for expression in WARMING:
        equal(expression, expression)
    print(READY, file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(compare_in_child(**request), file=replies, flush=True)


def compare_in_child(answer: str, reference: str, cpu_seconds: float) -> str:
    child = os.fork()
    if child == 0:
        status = VERDICTS.index(UNDECIDED)
        try:
            set_limits(cpu_seconds)
            status = VERDICTS.index(EQUAL if equal(answer, reference) else DIFFERENT)
        finally:  # whatever goes wrong leaves the comparison undecided
            os._exit(status)
    _, wait_status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(wait_status)
    return UNDECIDED if killed else VERDICTS[os.WEXITSTATUS(wait_status)]


def set_limits(cpu_seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for timer, kill, seconds in [
        # Processor time: what an expression gets must not depend on what else the machine does.
        (signal.ITIMER_PROF, signal.SIGPROF, cpu_seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, cpu_seconds * WALL_SECONDS_PER_CPU_SECOND),
    ]:
        signal.signal(kill, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [kill])
        signal.setitimer(timer, seconds)


def equal(answer: str, reference: str) -> bool:
    # Its own time limits are Python signal handlers, which would take the place of ours.
    parsed = [
        parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
        for text in (reference, answer)
    ]
    return bool(verify(*parsed, timeout_seconds=None))


if __name__ == "__main__":
    main()
