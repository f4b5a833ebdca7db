"""Namespaces without bubblewrap: a root folder that holds the interpreter and nothing else."""

from __future__ import annotations

import os
import signal
from typing import Any

from caldera.sandbox.inside import kernel

NEW_ROOT = "/tmp"  # any folder that exists: the new root is mounted over it, for this process alone


def enter_namespaces(view: dict[str, Any]) -> None:
    """Returns in a new process, the first of its PID namespace; this one waits for it."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare(
        kernel.CLONE_NEWUSER
        | kernel.CLONE_NEWNS
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWCGROUP
        | kernel.CLONE_NEWPID
    )
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _build_root(view)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _build_root(view: dict[str, Any]) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # The new root would hide what lies below its place: reach the host's files by another path.
    kernel.mount("root", NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.chdir(NEW_ROOT)
    os.mkdir("host")
    kernel.pivot_root(".", "host")
    os.chdir("/")
    for path in view["folders"]:
        os.makedirs(path)
    for path in (*view["read_only"], *view["devices"]):
        _bind(path)
    for path, target in view["links"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    # Before the host's own is gone: the kernel shows a new one only to those who see an old one.
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.unmount("/host")
    os.rmdir("/host")
    kernel.make_read_only("/")


def _bind(path: str) -> None:
    source = "/host" + path
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "a").close()
    kernel.mount(source, path, None, kernel.MS_BIND | kernel.MS_REC)
