"""`rollout.name=vllm` and `rollout.name=sglang`: samplers whose steps are those of an engine."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from caldera.config.samplers import KEY, SAMPLERS
from caldera.errors import RolloutError, UnsupportedError
from caldera.models.forward import base_module
from caldera.rollout.base import (
    ROLLOUTS,
    Completion,
    OnFinished,
    OnToken,
    Request,
    RolloutPart,
    StepwiseRollout,
)
from caldera.rollout.engines.host.caldera_engine.base import Event, SteppedEngine
from caldera.rollout.engines.options import (
    MEGABYTE,
    check_filters,
    engine_arguments,
    engine_environment,
    params_as_message,
    reseeded,
)
from caldera.rollout.engines.process import EngineDied, EngineProcess, EngineRanks, Sessions
from caldera.rollout.engines.request_state import ENDS, RequestState
from caldera.rollout.engines.weights import (
    AdapterFolders,
    AdapterShape,
    CudaBuckets,
    EngineWeights,
    ModuleWeights,
    WeightFiles,
    WeightSource,
    adapter_shape,
    told_of_merging,
    why_merged,
)
from caldera.rollout.weights import Probe, probe_module, sampling_dtype
from caldera.storage.locks import own_folder

if TYPE_CHECKING:
    from caldera.config import RolloutConfig


logger = logging.getLogger(__name__)

RESTARTS_IN_A_ROW = 3
"""How often an engine is started anew before any of its requests has ended."""


class EngineRollout(StepwiseRollout):
    """One or more engines with the same weights.

    Weights go over when a step is to be taken, not when they are loaded, and again to an engine
    that was started anew, or has slept. After each such push the engine must agree with the trainer
    on a probe.
    """

    def __init__(
        self,
        name: str,
        config: RolloutConfig,
        module: nn.Module,
        device: torch.device,
        engines: Sequence[SteppedEngine],
        weights: EngineWeights,
        dtype: torch.dtype,
        folder: Path | None = None,
        ranks: EngineRanks | None = None,
    ) -> None:
        """`folder` is what the engines were started from; it is removed with them. Of `ranks` that
        share engines the first has them; the others have none and only gather weights with it."""
        self.traits = SAMPLERS[name]
        super().__init__(config, module, device)
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._folder = folder
        self._ranks = ranks
        self.leads = ranks is None or ranks.leads
        self._engines = list(engines)
        self._weights = weights
        self._dtype = dtype
        self._probe: Probe | None = None
        self._sessions = Sessions()
        self._unproven: set[int] = set()  # engines with new weights that were not asked yet
        self._deaths = [0] * len(engines)  # in a row
        self._awake, self._warned_of_sleep = True, False
        self._engine_numbers = itertools.count()
        self._requests: dict[int, RequestState] = {}
        self._waiting: dict[int, RequestState] = {}  # without an engine
        self._in_engine: dict[int, RequestState] = {}  # by the number that the engine knows

    @property
    def pids(self) -> list[int]:
        """The processes of the engines, but for one that is in this process."""
        return [engine.pid for engine in self._engines if isinstance(engine, EngineProcess)]

    # ---- memory and weights

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Keep the weights, which are the engines' before the next token is sampled."""
        self._withdraw()
        self._weights.take_stream(stream)
        self._probe, self.version = None, version

    def update(self, source: WeightSource, version: int) -> None:
        """The same with what the source has, of which an adapter may go over alone."""
        self._withdraw()
        self._weights.take(source)
        self._probe, self.version = None, version

    def synchronize(self) -> None:
        """An engine wakes up on the GPUs of all its ranks once their models are offloaded."""
        if self._ranks is not None:
            self._ranks.wait()

    def expect(self, probe: Probe) -> None:
        """The expected output of an engine with the newest weights."""
        self._probe = probe

    def sleep(self) -> None:
        """Give back memory, of weights, too: they come again."""
        if not self._awake:
            return
        self._withdraw()
        slept = [self._sleep(place) for place in range(len(self._engines))]
        self._awake = False
        if all(slept):
            self._weights.lose_all()
        elif not self._warned_of_sleep:
            self._warned_of_sleep = True
            logger.info("%s cannot sleep on a %s: it keeps its memory", self.name, self.device)

    def wake_up(self, part: RolloutPart | None = None) -> None:
        """With `multi_stage_wake_up` the cache is allocated after the weights have come."""
        if part is None and self.config.multi_stage_wake_up:
            self._wake("weights")
            self._push()
            part = "kv_cache"
        self._wake(part)
        self._awake = self._awake or part != "weights"

    def close(self) -> None:
        """Remove the files, first, since there may be little time, and end the engines."""
        self._weights.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for engine in self._engines:
            engine.close()

    def _sleep(self, place: int) -> bool:
        try:
            return self._engines[place].sleep()
        except EngineDied as error:
            self._revive(place, error)
            return self._engines[place].sleep()

    def _wake(self, part: RolloutPart | None) -> None:
        if self._awake:
            return
        for place, engine in enumerate(self._engines):
            with self._reviving(place):  # what is started anew is awake
                engine.wake_up(part)

    def _push(self) -> None:
        """Bring the weights to the engines that lack them, but for one that dies meanwhile."""
        if self._weights.is_empty:
            self._take_own_weights()
        for place in sorted(self._weights.lacking):
            with self._reviving(place):
                self._weights.push(place, self._engines[place], self.version)
                self._unproven.add(place)

    def _take_own_weights(self) -> None:
        """Nobody has brought weights: those of the module are meant."""
        self._weights.take(ModuleWeights(self.module))
        with self.sampling_mode():
            self._probe = probe_module(self.module, self.device, self.config.longest_sequence)

    def _make_ready(self) -> None:
        """The engines have the newest weights, and have shown it."""
        while self._weights.lacking or self._unproven:
            self._push()
            for place in sorted(self._unproven):
                with self._reviving(place):
                    self._prove(place)
                self._unproven.discard(place)

    def _prove(self, place: int) -> None:
        if self._probe is not None:
            found = self._engines[place].score(self._probe.token_ids)
            self._probe.check(found, self._dtype, f"{self.name} (engine {place})")

    @contextmanager
    def _reviving(self, place: int) -> Iterator[None]:
        """If the engine dies meanwhile, it is started anew."""
        try:
            yield
        except EngineDied as error:
            self._revive(place, error)

    def _revive(self, place: int, error: EngineDied) -> None:
        """Start an engine anew, and let its requests wait for it."""
        self._deaths[place] += 1
        if self._deaths[place] > RESTARTS_IN_A_ROW:
            raise RolloutError(
                f"{self.name} died {self._deaths[place]} times before any request ended: {error}"
            ) from error
        engine = self._process(place)
        had = [number for number, f in self._in_engine.items() if f.replica == place]
        lost = self._requeue(had)
        engine.start()
        self.restarts += 1
        self._weights.lose(place)
        logger.warning(
            "%s (engine %d) was started anew: %s; requests that go on: %d, lost: %d",
            self.name,
            place,
            error,
            len(had) - lost,
            lost,
        )

    def _process(self, place: int) -> EngineProcess:
        engine = self._engines[place]
        assert isinstance(engine, EngineProcess), "an engine of this process is alone and immortal"
        return engine

    # ---- requests

    def check(self, requests: Sequence[Request]) -> None:
        super().check(requests)
        for request in requests:
            check_filters(self.traits, self.config, request.params)

    def add(
        self,
        request: Request,
        on_token: OnToken | None = None,
        on_finished: OnFinished | None = None,
    ) -> int:
        self.check([request])
        number = next(self._numbers)
        state = RequestState(number, request, on_token, on_finished)
        self._requests[number] = self._waiting[number] = state
        return number

    def abort(self, number: int) -> Completion | None:
        state = self._requests.pop(number, None)
        if state is None:
            return None
        self._leave(state)
        return state.completion("abort", self.version)

    def has_work(self) -> bool:
        return bool(self._requests or self._failures)

    # ---- steps

    @contextmanager
    def stepping(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # whatever it was, nobody waits for these any more
            try:
                self._withdraw()
            finally:
                for kept in (self._requests, self._waiting, self._in_engine, self._failures):
                    kept.clear()
            raise

    def step(self) -> None:
        """Wait until an engine has reported tokens, and add them."""
        if not self._awake:
            raise RolloutError("the sampler sleeps: wake it up before generating")
        self._make_ready()
        self._send_waiting()
        for place in self._ready():
            with self._reviving(place):
                for event in self._engines[place].step():
                    self._take_in(event)

    def _ready(self) -> list[int]:
        """The engines that have events, or will have next."""
        busy = sorted({state.replica for state in self._in_engine.values()})
        if len(busy) <= 1:
            return busy
        links = {place: self._process(place) for place in busy}
        if told := [place for place, link in links.items() if link.has_events]:
            return told
        readable = wait([link.connection for link in links.values()])
        return [place for place, link in links.items() if link.connection in readable]

    def _send_waiting(self) -> None:
        """Give all waiting requests to the engines."""
        load = [0] * len(self._engines)
        for state in self._in_engine.values():
            load[state.replica] += 1
        for state in list(self._waiting.values()):
            place = self._sessions.home(state.request.session, load)
            load[place] += 1
            try:
                self._send(state, place)
            except EngineDied as error:
                self._revive(place, error)
                return  # the next step brings the weights first
            except ValueError as error:  # of this request: the others go on
                self._fail(state, str(error))
            self._waiting.pop(state.number, None)

    def _send(self, state: RequestState, place: int) -> None:
        number = next(self._engine_numbers)
        state.assign(place, number)
        self._in_engine[number] = state
        request = state.request
        left = request.params.max_tokens - len(state.token_ids)
        message = params_as_message(request.params, left)
        message["prompt_logprobs"] = state.lacks_prompt_log_probs
        prompt = [*request.prompt_ids, *state.token_ids]
        self._engines[place].add(number, prompt, message, state.seed)

    def _take_in(self, event: Event) -> None:
        state = self._in_engine.get(event.number)
        if state is None:  # aborted meanwhile
            return
        if event.error is not None or event.finish_reason not in ENDS:
            self._fail(state, event.error or f"it was ended with {event.finish_reason!r}")
            return
        reason = state.take(event, self.decode)
        if reason is None:
            return
        del self._requests[state.number]
        self._leave(state, tell=event.finish_reason is None)
        self._deaths[state.replica] = 0
        if state.on_finished is not None:
            state.on_finished(state.number, state.completion(reason, self.version))

    def _fail(self, state: RequestState, why: str) -> None:
        """The engine does not go on with it; the others do."""
        del self._requests[state.number], self._in_engine[state.engine_number]
        self._failures[state.number] = RolloutError(f"{self.name} refuses a request: {why}")

    def _leave(self, state: RequestState, tell: bool = True) -> None:
        """The request ends; `tell` the engine, which would continue it otherwise."""
        if self._waiting.pop(state.number, None) is not None:
            return
        del self._in_engine[state.engine_number]
        if tell:
            with suppress(EngineDied):  # the next step finds out, and starts it anew
                self._engines[state.replica].abort(state.engine_number)

    def _withdraw(self) -> None:
        """Take every request back from the engines; each goes on from where it is."""
        for number, state in list(self._in_engine.items()):
            if number not in self._in_engine:  # its engine died: all of its requests are requeued
                continue
            with self._reviving(state.replica):
                self._engines[state.replica].abort(number)
            self._requeue([number])

    def _requeue(self, numbers: list[int]) -> int:
        """No engine has them any more; returns how many of them cannot go on."""
        lost = 0
        for number in numbers:
            state = self._in_engine.pop(number, None)
            if state is None:
                continue
            try:
                state.requeue()
            except RolloutError as error:  # the others go on
                lost += 1
                self._failures[state.number] = error
                self._requests.pop(state.number, None)
            else:
                self._waiting[state.number] = state
        return lost


# ---- From Caldera's keys to the arguments of an engine


class _ConfiguredEngine(EngineRollout):
    """Engines as the config asks for them. The module may be sharded: its config alone is used, and
    its weights if nobody brings others."""

    engine: ClassVar[str]

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        name = self.engine
        if config.engine_python is None:
            _require(name)
        dtype = sampling_dtype(module, config.dtype, device)
        folder = own_folder("caldera-model", Path(tempfile.gettempdir()))
        _write_config(module, folder)
        adapter = _adapter(name, config, module)
        ranks = EngineRanks.join(config.tensor_model_parallel_size, device)
        arguments = engine_arguments(name, config, str(folder), _devices(device, ranks), adapter)
        arguments["dtype"] = str(dtype).removeprefix("torch.")
        engines: list[SteppedEngine] = []
        if ranks is None or ranks.leads:
            with nullcontext() if adapter is None else told_of_merging():
                engines = _start(name, config, arguments, device, ranks)
        adapters = None if adapter is None else AdapterFolders(adapter)
        weights = _weights(config, dtype, device, engines, adapters, ranks)
        super().__init__(name, config, module, device, engines, weights, dtype, folder, ranks)


@ROLLOUTS.register("vllm")
class VllmRollout(_ConfiguredEngine):
    """Samples with vLLM."""

    engine = "vllm"
    traits = SAMPLERS[engine]


@ROLLOUTS.register("sglang")
class SglangRollout(_ConfiguredEngine):
    """Samples with SGLang."""

    engine = "sglang"
    traits = SAMPLERS[engine]


def _devices(device: torch.device, ranks: EngineRanks | None) -> int | None:
    """How many GPUs an engine can have; None: it runs on the CPU."""
    if device.type == "cpu":
        return None
    return torch.cuda.device_count() if ranks is None else len(ranks.devices)


def _start(
    name: str,
    config: RolloutConfig,
    arguments: dict[str, Any],
    device: torch.device,
    ranks: EngineRanks | None,
) -> list[SteppedEngine]:
    environment = engine_environment(name, config, device)
    python = config.engine_python
    alone = ranks is None and config.data_parallel_size == 1
    if python is None and name == "vllm" and alone:
        os.environ.update({key: os.environ.get(key, value) for key, value in environment.items()})
        return [_in_this_process(arguments)]
    # SGLang, when it is shut down, ends every child of the process that it is in.
    path = sys.executable if python is None else os.path.expanduser(python)
    rank = int(os.environ.get("RANK", "0"))

    devices = [] if ranks is None else ranks.devices

    def start(replica: int) -> SteppedEngine:
        seeded = reseeded(name, arguments, rank, replica)
        return EngineProcess(path, name, seeded, environment, devices)

    # vLLM measures free memory while it starts: on a GPU each waits for the one before.
    at_once = 1 if device.type == "cuda" else config.data_parallel_size
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(start, range(config.data_parallel_size)))


def _adapter(name: str, config: RolloutConfig, module: nn.Module) -> AdapterShape | None:
    """The engine's adapter; None if there is none, or it comes merged."""
    shape = adapter_shape(module)
    if shape is None:
        return None
    if (config.engine_kwargs.get(name) or {}).get("enable_lora") is False:
        why: str | None = f"{KEY}.engine_kwargs.{name}.enable_lora=False"
    else:
        why = why_merged(name, module, shape)
    if why is not None:
        logger.info("%s gets the adapter merged into the weights: %s", name, why)
        return None
    return shape


def _weights(
    config: RolloutConfig,
    dtype: torch.dtype,
    device: torch.device,
    engines: list[SteppedEngine],
    adapters: AdapterFolders | None,
    ranks: EngineRanks | None,
) -> EngineWeights:
    bucket = config.checkpoint_engine.update_weights_bucket_megabytes * MEGABYTE
    # The format of a memory handle is that of one version of torch.
    builds = {each.torch_version if isinstance(each, EngineProcess) else "" for each in engines}
    shares_gpu = device.type == "cuda" and builds == {str(torch.__version__)} and ranks is None
    cuda = CudaBuckets(dtype, bucket, device) if shares_gpu else None
    return EngineWeights(len(engines), WeightFiles(dtype, bucket), adapters, cuda)


def _require(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise UnsupportedError(
            f"{KEY}.name={name!r}: this Python has no {name}. Install it, or name a Python that "
            f"has it: {KEY}.engine_python=/path/to/python (scripts/engine_venv.py makes one)"
        )


def _in_this_process(arguments: dict[str, Any]) -> SteppedEngine:
    from caldera.rollout.engines.host.caldera_engine.vllm_engine import VllmEngine

    return VllmEngine(arguments)


def _write_config(module: nn.Module, folder: Path) -> None:
    """The sizes of the model that an engine needs. Requests bring their own stop tokens."""
    base_module(module).config.save_pretrained(folder)
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, "eos_token_id": None}), encoding="utf-8")
