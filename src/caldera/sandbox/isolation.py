"""How a slot's interpreter is shut off from the machine: by bubblewrap or by namespaces alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from caldera.errors import ConfigError, UnsupportedError

Method = Literal["bubblewrap", "namespaces", "none"]
METHODS: tuple[Method, ...] = ("bubblewrap", "namespaces", "none")

# Root gives every slot a separate user, who owns nothing and of whom nothing else runs.
FIRST_SLOT_USER = 61184

SYSTEM_INTERPRETERS = ("/usr/local/bin/python3", "/usr/bin/python3")
OLDEST_PYTHON = (3, 11)
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
LINKS = {"/tmp": "/box", "/dev/shm": "/box"}
ENVIRONMENT = {
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # the same program prints its sets in the same order every time
    "PYTHONDONTWRITEBYTECODE": "1",
}

PACKAGE = "caldera.sandbox.inside"
# Later ones import earlier ones.
MODULES = ("kernel", "seccomp", "wire", "serving", "testing", "program", "enter", "zygote")
BOOT = """
import json, os, socket, sys, types
given = json.loads(GIVEN)
sys.path.remove("")
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")  # should the host run out of memory, this is what it ends first
parent = None
for part in given["package"].split("."):
    name = parent.__name__ + "." + part if parent else part
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    if parent:
        setattr(parent, part, module)
    parent = module
for leaf, source in given["sources"]:
    module = types.ModuleType(given["package"] + "." + leaf)
    sys.modules[module.__name__] = module
    setattr(parent, leaf, module)
    exec(compile(source, "<inside>", "exec"), module.__dict__)
if given["view"]:
    parent.enter.enter_namespaces(given["view"])
control = socket.socket(fileno=os.dup(0))
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
parent.zygote.serve(control, given["in_namespaces"])
"""


@dataclass(frozen=True)
class Interpreter:
    """The Python that programs run in."""

    path: str
    prefixes: tuple[str, ...]


def slot_user(slot: int) -> int | None:
    """The user that a slot runs as; None: the one who runs this process."""
    return FIRST_SLOT_USER + slot if os.geteuid() == 0 else None


@cache
def find_interpreter(named: str | None, user: int | None) -> Interpreter:
    """The interpreter of that path; without one, the first that the slot's user can run.

    That user cannot reach a Python below /root, which is where many a root's Python lies.
    """
    own = getattr(sys, "_base_executable", None)
    candidates = (named,) if named else (own, *SYSTEM_INTERPRETERS)
    complaints = []
    for path in filter(None, candidates):
        try:
            return _ask_interpreter(path, user)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            complaints.append(f"{path}: {error}")
    version = ".".join(map(str, OLDEST_PYTHON))
    raise UnsupportedError(
        f"The sandbox needs a Python {version} or newer that user {user or os.geteuid()} can run. "
        f"Name one by `interpreter`. Tried {'; '.join(complaints)}"
    )


def _ask_interpreter(path: str, user: int | None) -> Interpreter:
    question = (
        "import json, os, sys; print(json.dumps([os.path.realpath(sys.executable), "
        "sys.version_info[:2], sys.prefix, sys.base_prefix]))"
    )
    answer = subprocess.run(
        [path, "-I", "-c", question],
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
        env={},
        timeout=30,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    real_path, version, *prefixes = json.loads(answer)
    if tuple(version) < OLDEST_PYTHON:
        raise ValueError(f"is Python {version[0]}.{version[1]}")
    in_virtual_environment = prefixes[0] != prefixes[1]
    return Interpreter(path if in_virtual_environment else real_path, tuple(prefixes))


def _view(interpreter: Interpreter) -> dict[str, Any]:
    """The files that programs see: libraries, the interpreter and a few devices."""
    links = dict(LINKS)
    shown = [os.path.realpath(interpreter.path)]
    for folder in LIBRARY_FOLDERS:
        if os.path.islink(folder):
            links[folder] = os.readlink(folder)
        elif os.path.isdir(folder):
            shown.append(folder)
    # The libraries of /usr are there already, and the rest of /usr is no program's business.
    shown += [prefix for prefix in dict.fromkeys(interpreter.prefixes) if prefix != "/usr"]
    shown = [path for path in shown if not any(path.startswith(f"{other}/") for other in shown)]
    return {
        "read_only": shown,
        "devices": [device for device in DEVICES if os.path.exists(device)],
        "folders": ["/box", "/proc", "/dev"],
        "links": links,
    }


def command_line(method: Method, interpreter: Interpreter) -> list[str]:
    """The command that starts a slot, whose control socket is its standard input."""
    view = _view(interpreter)
    given = {
        "package": PACKAGE,
        "sources": [[name, _source_of(name)] for name in MODULES],
        "view": view if method == "namespaces" else None,
        "in_namespaces": method != "none",
    }
    script = f"GIVEN = {json.dumps(given)!r}\n{BOOT}"
    python = [interpreter.path, "-s", "-c", script]
    return [*_bubblewrap(view), *python] if method == "bubblewrap" else python


@cache
def _source_of(name: str) -> str:
    return (Path(__file__).parent / "inside" / f"{name}.py").read_text(encoding="utf-8")


def _bubblewrap(view: dict[str, Any]) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError("isolation='bubblewrap' needs the program bwrap, which is not here")
    # To the slot alone, in its own user namespace: it makes namespaces for each program, who has
    # no privilege at all. The slot ends when its control socket closes; --die-with-parent would
    # end it with the thread that happened to start it.
    command = [program, "--unshare-all", "--new-session", "--cap-add", "CAP_SYS_ADMIN"]
    for path in view["read_only"]:
        command += ["--ro-bind", path, path]
    for path in view["devices"]:
        command += ["--dev-bind", path, path]
    for path, target in view["links"].items():
        command += ["--symlink", target, path]
    return [*command, "--dir", "/box", "--proc", "/proc", "--remount-ro", "/", "--"]
