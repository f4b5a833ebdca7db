"""How values go from one process of a machine to another.

Tensors are not copied into the message: their memory is moved to shared memory, once, and the
other process maps it. Both sides then see the same numbers, as two holders of a tensor in one
process do. Everything else is pickled.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
from multiprocessing import resource_sharer
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType, TracebackType
from typing import Any

import cloudpickle
import torch
import torch.multiprocessing  # teaches ForkingPickler to hand tensors over
from tensordict import TensorDict

from caldera.protocol import DataProto, DataProtoFuture
from caldera.protocol.inputs import entries

logger = logging.getLogger(__name__)


MAIN = "__main__"


def start_without_main(process: BaseProcess) -> None:
    """Start a process that does not import the main script, which would run it again unless it has
    an `if __name__ == "__main__"`. Classes and functions of it go along in messages."""
    main = sys.modules[MAIN]
    sys.modules[MAIN] = ModuleType(MAIN)
    try:
        process.start()
    finally:
        sys.modules[MAIN] = main


class _Pickler(ForkingPickler):
    """Takes a DataProto apart, which by itself would make bytes of its tensors."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is DataProto:
            return DataProto, (value.batch, value.non_tensor_batch, value.meta_info)
        if type(value) is TensorDict:
            tensors = {key: _portable(entry) for key, entry in entries(value).items()}
            return TensorDict, (tensors, tuple(value.batch_size))
        if isinstance(value, type | FunctionType) and value.__module__ == MAIN:
            return cloudpickle.loads, (cloudpickle.dumps(value),)
        if isinstance(value, DataProtoFuture):  # another process could not wait for it
            return DataProtoFuture.concat, ([value.get()],)
        if type(value) is torch.Tensor and value.device.type != "cpu":
            return torch.Tensor.detach, (_portable(value),)
        return NotImplemented


def dumps(value: Any) -> bytes:
    """A message for another process; what it refers to must stay until it has been read."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def loads(message: bytes) -> Any:
    """The value of a message."""
    return ForkingPickler.loads(message)


def _portable(entry: Any) -> Any:
    """A tensor on the CPU without its history, since neither devices nor graphs are shared."""
    return entry.detach().cpu() if isinstance(entry, torch.Tensor) else entry


@functools.cache
def keep_handovers_quiet() -> None:
    """Print no traceback when a process dies while it fetches memory of this one.

    The thread that hands it out goes on, and the process that waits for that one reports its end.
    """
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        name = trace.tb_frame.f_globals.get("__name__") if trace else None
        if name == resource_sharer.__name__ and isinstance(error, EOFError | OSError):
            logger.debug("a process went away while it fetched memory: %r", error)
        else:
            before(kind, error, trace)

    sys.excepthook = tell
