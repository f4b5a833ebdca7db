"""The calls of Linux that Python has no function for."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 47, 4
CAPABILITY_VERSION = 0x20080522

AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2

SYSTEM_CALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}

# PyDLL keeps the interpreter's lock, which a process that comes out of clone must hold.
_libc = ctypes.PyDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _system_call(name: str, *arguments: object) -> int:
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"{name}: not known for processors of the kind {platform.machine()}")
    return _checked(name, _libc.syscall(ctypes.c_long(numbers[name]), *arguments))


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def fork_into(flags: int) -> int:
    """`os.fork`, with the child in new namespaces."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    try:
        none = ctypes.c_void_p(None)
        all_flags = ctypes.c_ulong(flags | signal.SIGCHLD)
        pid = _system_call("clone", all_flags, none, none, none, none)
    except OSError:
        python.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_or_null = kind.encode() if kind else None
    arguments = (source.encode(), target.encode(), kind_or_null)
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None)
    _checked(f"mount {target}", result)


def unmount(target: str) -> None:
    _checked(f"umount {target}", _libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)))


def make_read_only(target: str) -> None:
    """The mount at `target` and all those below it."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    _system_call(
        "mount_setattr",
        ctypes.c_int(AT_FDCWD),
        target.encode(),
        ctypes.c_uint(AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def pivot_root(new_root: str, old_root: str) -> None:
    _system_call("pivot_root", new_root.encode(), old_root.encode())


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _checked("prctl", _libc.prctl(ctypes.c_int(option), *padded))


def drop_capabilities() -> None:
    """Give up every privilege, and the ways of getting one back."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _system_call("capset", header, (ctypes.c_uint32 * 6)())
    prctl(PR_SET_NO_NEW_PRIVS, 1)
