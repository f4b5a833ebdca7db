"""Programs that a model wrote, hostile ones among them, in real sandboxes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from caldera.errors import ConfigError, DataError, RewardError, UnsupportedError
from caldera.sandbox import Limits, Outcome, Sandbox, SandboxFusionClient
from caldera.sandbox.isolation import Method, find_interpreter, slot_user
from caldera.sandbox.server import SandboxServer
from caldera.sandbox.slot import Slot, _step

REPOSITORY = Path(__file__).parents[2]
HOSTILE = sorted((REPOSITORY / "tests/data/hostile").glob("*.py"))
CODE = REPOSITORY / "tests/data/code"
METHODS: list[Method] = ["bubblewrap", "namespaces"]
SLOTS = 4
LIMITS = Limits(
    wall_seconds=20.0, cpu_seconds=20, memory_mb=128, disk_mb=8, processes=8, open_files=64,
    output_bytes=2**18,
)  # fmt: skip
SLEEPER = "import time\nopen('left', 'w').close()\ntime.sleep(600)\n"
IMPATIENT = replace(LIMITS, wall_seconds=0.7)  # for programs that never end
# Two tasks, for hostile programs to get wrong.
STDIN, STDOUT = "6 7\n", "42\n"
TESTS = "assert multiply(6, 7) == 42\nassert multiply(3, 5) == 15\n"
RIGHT_OUTPUT = "a, b = map(int, input().split())\nprint(a * b)\n"
RIGHT_FUNCTION = "def multiply(a, b):\n    return a * b\n"


def processes_below(parent: int) -> set[int]:
    """The processes that `parent` started, and those that they started."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    found: set[int] = set()
    while new := {child for child, of in parents.items() if of in {parent, *found}} - found:
        found |= new
    return found


def is_running(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """A slot that a busy machine keeps waiting is not taken for dead; and no proxy is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("caldera.sandbox.slot.SECONDS_TO_END", 60.0)
        patch.setenv("no_proxy", "127.0.0.1")
        yield


def need_tool_of(method: Method) -> None:
    """Skip where bubblewrap is missing, but for continuous integration, which has to have it."""
    if method == "bubblewrap" and shutil.which("bwrap") is None:
        if os.environ.get("CI") == "true":  # no assert: that would print the whole environment
            pytest.fail("CI=true and bubblewrap (bwrap) is not installed")
        pytest.skip("bubblewrap is not installed")


def make_sandbox(method: Method, slots: int = SLOTS) -> Sandbox:
    need_tool_of(method)
    return Sandbox(LIMITS, slots, isolation=method)


@pytest.fixture(scope="module", params=METHODS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    before = processes_below(os.getpid())
    with make_sandbox(request.param) as sandbox:
        yield sandbox
    assert processes_below(os.getpid()) <= before


# ---------------------------------------------------------------------- hostile programs


@dataclass(frozen=True)
class Attack:
    source: str
    task: str
    ends: str

    @classmethod
    def read(cls, path: Path) -> Attack:
        source = path.read_text(encoding="utf-8")
        task = re.search(r"^# task: (.+)$", source, re.MULTILINE)
        ends = re.search(r"^# ends: (.+)$", source, re.MULTILINE)
        assert task and ends, path
        return cls(source, task[1], ends[1])

    def attempt(self, sandbox: Sandbox) -> Outcome:
        limits = IMPATIENT if "timed out" in self.ends else LIMITS
        if self.task == "function":
            return sandbox.check(self.source, TESTS, limits)
        return sandbox.run(self.source, STDIN, limits=limits)


@pytest.fixture(scope="module")
def attempts(sandbox: Sandbox) -> Iterator[dict[str, Outcome]]:
    """All of them side by side; what they leave behind is looked at afterwards."""
    for _ in range(SLOTS):  # they take turns, and start at their first
        assert sandbox.run("").ok
    idle = len(processes_below(os.getpid()))
    library = Path(find_interpreter(None, slot_user(0)).prefixes[0]) / "lib"
    changed = library.stat().st_mtime_ns
    with ThreadPoolExecutor(SLOTS) as threads:
        outcomes = threads.map(lambda path: Attack.read(path).attempt(sandbox), HOSTILE)
        results = dict(zip([path.stem for path in HOSTILE], outcomes, strict=True))
    assert len(processes_below(os.getpid())) == idle
    assert library.stat().st_mtime_ns == changed
    yield results


def test_there_are_enough_hostile_programs() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.stem)
def test_a_hostile_program_fails(path: Path, attempts: dict[str, Outcome]) -> None:
    attack, outcome = Attack.read(path), attempts[path.stem]
    passed = outcome.ok and (attack.task == "function" or outcome.stdout == STDOUT)
    assert not passed
    status, _, error = attack.ends.partition(": ")
    assert outcome.status in status.split("|"), outcome
    said = f"{outcome.stderr}\n{outcome.raised}"
    assert not error or re.search(error, said), said


@pytest.mark.parametrize("path", ["/evil", "/usr/lib/evil", "/dev/evil", "/box"])
def test_nothing_was_written_outside(path: str, attempts: dict[str, Outcome]) -> None:
    assert attempts
    assert not os.path.lexists(path)


def test_the_next_program_is_unharmed(sandbox: Sandbox, attempts: dict[str, Outcome]) -> None:
    assert attempts
    outcomes = sandbox.run_many([(RIGHT_OUTPUT, STDIN)] * 3 * SLOTS)
    assert [outcome.stdout for outcome in outcomes] == [STDOUT] * 3 * SLOTS
    assert all(outcome.ok for outcome in outcomes)
    assert sandbox.check(RIGHT_FUNCTION, TESTS).ok
    listing = sandbox.run("import os; print(os.listdir('.'), os.listdir('/tmp'))")
    assert listing.stdout == "[] []\n", "files of an earlier program"


# ---------------------------------------------------------------------- programs


def test_a_program_ends_as_python_ends_it(sandbox: Sandbox) -> None:
    program = (
        "import atexit, os, sys, threading\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=print, args=('thread',)).start()\n"
        "assert __name__ == '__main__'\n"
        "print(open('data/table.txt').read(), input(), file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    outcome = sandbox.run(program, "grüße\n", {"data/table.txt": b"1 2"})
    assert (outcome.status, outcome.exit_code) == ("failed", 3)
    assert (outcome.stdout, outcome.stderr) == ("thread\nlast\n", "1 2 grüße\n")
    assert sandbox.run("import os, signal; os.kill(os.getpid(), 15)").exit_code == -signal.SIGTERM
    assert "line 2" in sandbox.run("\nint('x')").stderr
    assert "SyntaxError" in sandbox.run("def").stderr
    assert sandbox.run("\0").status == sandbox.run("'\ud800'").status == "failed"
    assert sandbox.run("print(len(input()))", "\ud800\n").ok


def test_large_inputs_and_outputs(sandbox: Sandbox) -> None:
    text = "0123456789\n" * 20_000
    program = f"# {'x' * 300_000}\nimport sys\nsys.stdout.write(sys.stdin.read())\n"
    assert sandbox.run(program, text).stdout == text
    assert sandbox.run("print('it does not read')", text).stdout == "it does not read\n"


def test_programs_may_have_processes_and_threads(sandbox: Sandbox) -> None:
    program = (
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    print(sum(pool.map(abs, range(-9, 0))))\n"
    )
    assert sandbox.run(program).stdout == "45\n", sandbox.run(program).stderr


def test_values_of_functions(sandbox: Sandbox) -> None:
    values = [
        None, True, -(2**70), 0.1, float("inf"), 1j, "ä\0", b"\xff", (1, [2, {3}]),
        {(1, 2): frozenset({3})}, range(3), [[]],
    ]  # fmt: skip
    outcome = sandbox.call("def same(values, *, more): return values, more", "same", [values],
                           {"more": "x"})  # fmt: skip
    assert outcome.ok and outcome.value == (values, "x")
    method = "class Solution:\n    def twice(self, x):\n        return 2 * x"
    assert sandbox.call(method, "Solution.twice", [21]).value == 42
    assert sandbox.call("def f(): return {}['x']", "f").raised == "KeyError: 'x'"
    assert sandbox.call("def f(): return object()", "f").status == "failed"
    assert "defines no 'g'" in str(sandbox.call("def f(): pass", "g").raised)
    assert sandbox.call("x = [\n", "f").status == "failed"
    with pytest.raises(RewardError, match="not plain data"):
        sandbox.call("def f(x): pass", "f", [object()])


def test_tests_may_use_more_than_functions(sandbox: Sandbox) -> None:
    program = (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n"
        "def total(pairs):\n    return sum(p.a * p.b for p in pairs)\n"
        "def refuse(x):\n    raise ValueError(x)\n"
        "def of_kind(values, kind):\n    return [v for v in values if isinstance(v, kind)]\n"
        "root = Pair(2, 3)\n"
    )
    tests = (
        "assert total([Pair(1, 2), root]) == 8\n"
        "assert math.isclose(total([]), 0)\n"
        "assert of_kind([1, 'a', 2.0], str) == ['a']\n"
        "try:\n    refuse(1)\nexcept ValueError as error:\n    assert str(error) == '1'\n"
        "else:\n    raise AssertionError\n"
    )
    assert sandbox.check(program, tests).ok
    assert not sandbox.check(program, tests + "assert total([root]) == 7\n").ok


def test_solutions_of_humaneval(sandbox: Sandbox) -> None:
    rows = [json.loads(line) for line in (CODE / "humaneval.jsonl").read_text().splitlines()]
    for row in rows:
        tests = f"{row['test']}\ncheck({row['entry_point']})\n"
        outcome = sandbox.check(row["prompt"] + row["canonical_solution"], tests)
        assert outcome.ok, (row["task_id"], outcome)
        assert not sandbox.check(row["prompt"] + "    return None\n", tests).ok, row["task_id"]


def test_solutions_of_mbpp(sandbox: Sandbox) -> None:
    rows = [json.loads(line) for line in (CODE / "mbpp.jsonl").read_text().splitlines()]
    for row in rows:
        tests = "\n".join([row["test_setup_code"], *row["test_list"]])
        outcome = sandbox.check(row["code"], tests)
        assert outcome.ok, (row["task_id"], outcome)


# ---------------------------------------------------------------------- slots


def test_a_slot_that_dies_is_started_anew() -> None:
    others = set(processes_below(os.getpid()))

    def kill() -> None:
        for pid in set(processes_below(os.getpid())) - others:
            with suppress(ProcessLookupError):  # one of the others has taken it along
                os.kill(pid, signal.SIGKILL)

    with make_sandbox("namespaces", slots=1) as sandbox:
        assert sandbox.run("").ok  # it has started: what is killed is running a program
        timer = threading.Timer(0.3, kill)
        timer.start()
        assert sandbox.run("while True: pass").status == "failed"
        timer.join()
        assert sandbox.run(RIGHT_OUTPUT, STDIN).stdout == STDOUT


def test_a_closed_sandbox_runs_nothing() -> None:
    sandbox = make_sandbox("namespaces", slots=1)
    sandbox.close()
    sandbox.close()
    with pytest.raises(RewardError, match="closed"):
        sandbox.run("print(1)")


def test_no_isolation_must_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="allow_unsafe"):
        Sandbox(LIMITS, 1, isolation="none")
    with pytest.raises(ConfigError, match="not one of bubblewrap, namespaces, none"):
        Sandbox(LIMITS, 1, isolation="docker")  # type: ignore[arg-type]
    with Sandbox(LIMITS, 1, isolation="none", allow_unsafe=True) as sandbox:
        assert sandbox.run(RIGHT_OUTPUT, STDIN).stdout == STDOUT
        assert sandbox.check(RIGHT_FUNCTION, TESTS).ok
        refused = sandbox.run("import socket; socket.socket()")
        assert "PermissionError" in refused.stderr
        assert sandbox.run("while True: pass", limits=IMPATIENT).status == "timed out"
        folder = Path(sandbox.run("import os; print(os.getcwd())").stdout.strip())
        assert not folder.exists()


def test_a_machine_that_cannot_isolate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnsupportedError, match=r"allow_unsafe=True.*bubblewrap:.*namespaces:"):
        Sandbox(LIMITS, 1, interpreter="/nowhere/python3")


@pytest.mark.parametrize("name", ["../x", "/etc/x", ""])
def test_files_stay_in_the_folder(name: str, sandbox: Sandbox) -> None:
    with pytest.raises(DataError, match="not the name of a file"):
        sandbox.run("", files={name: b""})


# ---------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def server() -> Iterator[SandboxServer]:
    with make_sandbox("namespaces", 2) as sandbox, SandboxServer(sandbox, "127.0.0.1", 0) as server:
        yield server


def test_the_client_gets_what_the_sandbox_gets(server: SandboxServer) -> None:
    client = SandboxFusionClient(server.url, LIMITS, max_concurrent=4)
    assert client.run(RIGHT_OUTPUT, STDIN).stdout == STDOUT
    assert client.run("print(open('x').read())", files={"x": b"1"}).stdout == "1\n"
    failed = client.run("import sys; sys.exit(7)")
    assert (failed.status, failed.exit_code) == ("failed", 7)
    assert client.run("while True: pass", limits=IMPATIENT).status == "timed out"
    assert not client.run("kept = 'x' * 2**28", limits=replace(LIMITS, memory_mb=64)).ok
    outcomes = client.run_many([(RIGHT_OUTPUT, f"{n} 2\n") for n in range(8)])
    assert [outcome.stdout for outcome in outcomes] == [f"{2 * n}\n" for n in range(8)]


def post(url: str, body: bytes) -> dict[str, object]:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as response:
        answer: dict[str, object] = json.load(response)
    return answer


def test_the_server_speaks_sandbox_fusion(server: SandboxServer) -> None:
    request = {"code": "print(input())", "stdin": "x", "language": "python", "run_timeout": 5}
    answer = post(f"{server.url}/run_code", json.dumps(request).encode())
    result = answer["run_result"]
    assert isinstance(result, dict) and result.pop("execution_time") > 0
    assert result == {"status": "Finished", "return_code": 0, "stdout": "x\n", "stderr": ""}
    assert (answer["status"], answer["compile_result"], answer["files"]) == ("Success", None, {})
    with urllib.request.urlopen(f"{server.url}/v1/ping", timeout=30) as response:
        assert json.load(response) == "pong"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"code": "x", "language": "cpp"}, 422, "language='cpp' is not one of python"),
        ({"code": 1, "language": "python"}, 422, "must be strings"),
        ({"code": "", "language": "python", "run_timeout": -1}, 422, "run_timeout=-1.0"),
        ({"code": "", "language": "python", "fetch_files": ["x"]}, 422, "fetch_files"),
        ({"code": "", "language": "python", "files": {"x": 1}}, 422, "base64"),
        ({"code": "", "language": "python", "files": {"../x": "eA=="}}, 422, "not the name"),
        ({"code": "", "language": "python", "memory_limit_MB": math.inf}, 422, "no JSON number"),
        ([], 422, "JSON object"),
        (b"[" * 100_000, 422, "nested deeper than 100"),
    ],
)
def test_bad_requests_are_refused(
    body: object, status: int, message: str, server: SandboxServer
) -> None:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(urllib.error.HTTPError) as error:
        post(f"{server.url}/run_code", sent)
    with error.value:
        assert error.value.code == status
        assert message in error.value.read().decode()


def test_a_client_without_a_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caldera.sandbox.fusion.FIRST_PAUSE_SECONDS", 0.01)
    with pytest.raises(RewardError, match=r"no answer from http://127\.0\.0\.1:9/run_code"):
        SandboxFusionClient("http://127.0.0.1:9", attempts=2).run("print(1)")
    with pytest.raises(ConfigError, match="not the address"):
        SandboxFusionClient("localhost")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_command_serves_and_leaves_nothing_behind(end: signal.Signals) -> None:
    command = [sys.executable, "-m", "caldera.cli", "sandbox", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.match(r"(http://127\.0\.0\.1:\d+)/run_code: 2 slots, isolated by \w+", line)
        assert url, line
        assert SandboxFusionClient(url[1], LIMITS).run(RIGHT_OUTPUT, STDIN).stdout == STDOUT
        slots = processes_below(process.pid)
        process.send_signal(end)
        assert process.wait(60) == (0 if end == signal.SIGINT else -end)
    deadline = time.monotonic() + 60
    while any(map(is_running, slots)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert slots and not any(map(is_running, slots))


def test_a_port_that_cannot_be_had_is_told(server: SandboxServer) -> None:
    with pytest.raises(ConfigError, match=f"port {server.port}"):
        SandboxServer(server.sandbox, "127.0.0.1", server.port)


# ---------------------------------------------------------------------- ordinary users


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("method", METHODS)
def test_an_ordinary_user_has_it_too(method: Method) -> None:
    need_tool_of(method)
    program = (
        "import sys\n"
        "from caldera.sandbox import Sandbox\n"
        "with Sandbox(slots=1, isolation=sys.argv[1]) as sandbox:\n"
        "    print(sandbox.run('print(6 * 7)').stdout, end='')\n"
        "    print(sandbox.run('open(\"/etc/passwd\")').status)\n"
        "    print(sandbox.check('def f(): return 1', 'assert f() == 1').status)\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # without the packages that others need
        os.chmod(folder, 0o755)
        package = Path(folder) / "caldera"
        shutil.copytree(REPOSITORY / "src/caldera/sandbox", package / "sandbox")
        for module in ("errors.py", "http_client.py"):
            shutil.copy(REPOSITORY / "src/caldera" / module, package)
        (package / "__init__.py").touch()
        user = 61100
        done = subprocess.run(
            [find_interpreter(None, user).path, "-c", program, method],
            user=user, group=user, extra_groups=[], cwd=folder,
            env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
        )  # fmt: skip
    assert done.stdout.split("\n") == ["42", "failed", "ok", ""], done.stderr


def test_no_folder_outlives_a_caller_that_was_killed() -> None:
    """Without namespaces, programs have theirs in the host's temporary folder."""

    def folders() -> set[Path]:
        return set(Path("/tmp").glob("caldera-sandbox-*"))

    before = folders()
    slot = Slot(0, "none", None)
    run = slot.start("run", LIMITS, {"program": SLEEPER, "files": {}})
    while not any((folder / "left").exists() for folder in folders() - before):
        _step(slot, [run], 0.1)
    run.close()
    slot.close()
    assert folders() == before
