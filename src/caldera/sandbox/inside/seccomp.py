"""A filter of system calls: no sockets, no mounts, no namespaces, no look into other processes.

The namespaces contain a program already. The filter takes the kernel's less travelled roads away,
and the memory that the other limits do not count (SysV segments, memfd).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from caldera.sandbox.inside import kernel

# name: (x86_64, aarch64)
REFUSED = {
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "mq_open": (240, 180),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
# Without a PID namespace a program must stay in its process group, by which it is ended, and must
# not send signals to whatever else its user runs.
REFUSED_WITHOUT_NAMESPACES = {
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
CLONE, CLONE3 = (56, 220), 435
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FIRST_X32_CALL = 0x40000000  # on x86_64, a second set of numbers for the same calls
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _program(in_namespaces: bool) -> bytes:
    machine = platform.machine()
    column = list(AUDIT_ARCHITECTURES).index(machine)
    refused = dict(REFUSED) if in_namespaces else REFUSED | REFUSED_WITHOUT_NAMESPACES
    parts = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(JUMP_EQUAL, AUDIT_ARCHITECTURES[machine], if_true=1),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER),
        _instruction(JUMP_GREATER_EQUAL, FIRST_X32_CALL, if_false=1),
        _instruction(RETURN, KILL),
        # Its flags lie in memory, out of a filter's sight. The C library then uses clone.
        _instruction(JUMP_EQUAL, CLONE3, if_false=1),
        _instruction(RETURN, FAIL | errno.ENOSYS),
    ]
    for numbers in refused.values():
        parts.append(_instruction(JUMP_EQUAL, numbers[column], if_false=1))
        parts.append(_instruction(RETURN, FAIL | errno.EPERM))
    parts += [
        _instruction(JUMP_EQUAL, CLONE[column], if_false=3),
        _instruction(LOAD, FIRST_ARGUMENT),
        _instruction(JUMP_ANY_BIT, NEW_NAMESPACES, if_false=1),
        _instruction(RETURN, FAIL | errno.EPERM),
        _instruction(RETURN, ALLOW),
    ]
    return b"".join(parts)


def install_filter(in_namespaces: bool) -> None:
    """From here on, for this process and all that it starts. Needs PR_SET_NO_NEW_PRIVS."""
    program = _program(in_namespaces)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    header_buffer = ctypes.create_string_buffer(header, len(header))
    filter_address = ctypes.addressof(header_buffer)
    kernel.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_address)
