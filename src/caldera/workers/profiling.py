"""Workers whose phases can be recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from caldera.config.profiling import GlobalTorchMemoryConfig, ProfilerConfig
from caldera.single_controller import Dispatch, Worker, register
from caldera.workers.recording import RECORDER, marked

F = TypeVar("F", bound=Callable[..., Any])


def profiled(role: str) -> Callable[[F], F]:
    """A method of a `ProfiledWorker` that is a phase of this role."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def phase(self: ProfiledWorker, *args: Any, **kwargs: Any) -> Any:
            with self.phase(role, method.__name__):
                return method(self, *args, **kwargs)

        return cast(F, phase)

    return wrap


class ProfiledWorker(Worker):
    """Records steps as the profilers of its roles say.

    A role that records discretely has a file for each of its phases; the others share one that
    holds the whole step, in which all phases of the process are marked.
    """

    def __init__(self, profilers: Mapping[str, ProfilerConfig]) -> None:
        """`profilers`: by role."""
        super().__init__()
        self._profilers = profilers
        self._step: str | None = None
        self._snapshots = GlobalTorchMemoryConfig()
        self._is_whole = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, step: str, memory: GlobalTorchMemoryConfig) -> None:
        """Record from now on; `step` is the folder of the files."""
        self._step, self._snapshots = step, memory
        whole = [role for role in self._recorded() if not self._is_discrete(role)]
        self._is_whole = bool(whole)
        if whole:
            RECORDER.start(self._profilers[whole[0]], memory, self._name(whole[0]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """Write what was recorded."""
        if self._is_whole:
            RECORDER.stop()
        self._step, self._is_whole = None, False

    @contextmanager
    def phase(self, role: str, name: str) -> Iterator[None]:
        """The block is marked, and recorded alone if the role says so."""
        if self._step is None:
            yield
            return
        alone = role in self._recorded() and self._is_discrete(role) and not self._is_whole
        if alone:
            RECORDER.start(self._profilers[role], self._snapshots, self._name(f"{role}_{name}"))
        try:
            with marked(name):
                yield
        finally:
            if alone:
                RECORDER.stop()

    def _recorded(self) -> list[str]:
        """Roles that are recorded on this rank."""
        return [
            role
            for role, config in self._profilers.items()
            # A config that no loader has resolved holds the name of the key that it follows.
            if config.enable is True and (config.all_ranks or self.rank in config.ranks)
        ]

    def _is_discrete(self, role: str) -> bool:
        config = self._profilers[role]
        tools = config.tool_config
        by_tool = {"nsys": tools.nsys.discrete, "torch": tools.torch.discrete}
        return by_tool.get(str(config.tool), False)

    def _name(self, what: str) -> str:
        return f"{self._step}/{what}_rank_{self.rank}"
