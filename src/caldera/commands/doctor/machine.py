"""What a machine has room for, and whom it can reach."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from caldera.commands.doctor.command import Finding, broken, doubtful, ok
from caldera.errors import CalderaError
from caldera.storage.paths import cache_folder

GIB = 2**30
ENOUGH_DISK = 20 * GIB
LEAST_DISK = GIB
ENOUGH_SHARED = GIB
LEAST_SHARED = 64 * 2**20
SHARED_MEMORY = Path("/dev/shm")
SECONDS_TO_CONNECT = 3.0
YES = ("1", "ON", "YES", "TRUE")


def check_disk() -> Iterator[Finding]:
    """Where runs write, and where models and fetched files are kept."""
    places = {
        "disk here": Path.cwd(),
        "disk of the cache": cache_folder(),
        "disk of temporary files": Path(tempfile.gettempdir()),
    }
    for name, folder in places.items():
        mend = "CALDERA_CACHE=FOLDER names another" if "cache" in name else "df -h; du -xhd1 /"
        yield room(name, folder, ENOUGH_DISK, LEAST_DISK, mend)


def check_shared_memory() -> Iterator[Finding]:
    """What batches travel through between processes."""
    fix = "mount -o remount,size=8G /dev/shm; of a container: docker run --shm-size=8g"
    if not SHARED_MEMORY.is_dir():
        yield broken("shared memory", f"{SHARED_MEMORY} is not there", fix)
    else:
        yield room("shared memory", SHARED_MEMORY, ENOUGH_SHARED, LEAST_SHARED, fix)


def room(name: str, folder: Path, enough: int, least: int, fix: str) -> Finding:
    """Free space of a folder that may not be there yet, and whether one may write there."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return broken(name, f"{folder}: {error.strerror}", fix)
    told = f"{free / GIB:.1f} GiB free in {folder}"
    if free < least:
        return broken(name, told, fix)
    return doubtful(name, told, fix) if free < enough else ok(name, told)


def check_ports() -> Iterator[Finding]:
    """Ranks and servers meet on ports of this machine, under its name."""
    fix = "allow connections to 127.0.0.1 in the firewall or the container"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), SECONDS_TO_CONNECT):
                yield ok("ports", f"a server on 127.0.0.1:{port} could be reached")
    except OSError as error:
        yield broken("ports", f"no server can be reached on 127.0.0.1: {error}", fix)
    host = socket.gethostname()
    try:
        yield ok("host name", f"{host} is {socket.gethostbyname(host)}")
    except OSError as error:
        mend = f"echo '127.0.0.1 {host}' >> /etc/hosts"
        yield doubtful("host name", f"{host} has no address: {error}", mend)


def check_hub() -> Iterator[Finding]:
    """Whether models can come from the hub."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in YES:
            yield ok("hub", f"{name}={os.environ[name]}: models come from folders and the cache")
            return
    from huggingface_hub.constants import ENDPOINT

    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT)
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    fix = "export HF_HUB_OFFLINE=1 where models are folders; HF_ENDPOINT=URL names a mirror"
    try:
        with socket.create_connection((parts.hostname or "", port), SECONDS_TO_CONNECT):
            yield ok("hub", f"{endpoint} can be reached")
    except OSError as error:
        yield doubtful("hub", f"{endpoint} cannot be reached: {error}", fix)


def check_sandbox() -> Iterator[Finding]:
    """Whether programs of models can be run, and shut off by what."""
    from caldera.sandbox import Sandbox

    fix = "apt-get install bubblewrap; or sysctl kernel.unprivileged_userns_clone=1"
    try:
        with Sandbox(slots=1) as sandbox:
            answer = sandbox.run("print(6 * 7)")
    except CalderaError as error:
        yield doubtful("sandbox", f"code cannot be scored: {str(error).splitlines()[0]}", fix)
        return
    if answer.stdout.strip() != "42":
        yield doubtful("sandbox", f"a program of one line ended as {answer.status}", fix)
    else:
        has = "" if shutil.which("bwrap") else "; the program bwrap is not here"
        yield ok("sandbox", f"programs are isolated by {sandbox.isolation}{has}")
