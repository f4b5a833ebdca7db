"""What stands between Caldera and an engine, with an engine of a few lines at the other end."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from caldera.config import RolloutConfig
from caldera.errors import ConfigError, RolloutError, UnsupportedError
from caldera.rollout import ROLLOUTS, AsyncSampler, Request, SamplingParams
from caldera.rollout.engines.host.caldera_engine.base import Event
from caldera.rollout.engines.host.caldera_engine.buckets import check_adapter, read_bucket
from caldera.rollout.engines.options import SEED, engine_arguments, reseeded
from caldera.rollout.engines.process import EngineDied, Sessions
from caldera.rollout.engines.rollout import EngineRollout
from caldera.rollout.engines.weights import (
    AdapterFolders,
    EngineWeights,
    ModuleWeights,
    WeightFiles,
    adapter_shape,
)
from caldera.rollout.weights import Probe
from caldera.storage.locks import own_folder

CPU = torch.device("cpu")


class CountingEngine:
    """Its next token is the last one plus the weights' version, with the log-prob 0. It refuses
    the prompt 13, and gives up on 14."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[list[int], int]] = {}
        self.version = 0
        self.pushes: list[int] = []
        self.buckets = 0
        self.adapters: list[str] = []
        self.seeds: list[int] = []
        self.told = [-1.0, -2.0]

    def add(self, number: int, prompt_ids: list[int], params: dict[str, Any], seed: int) -> None:
        if prompt_ids == [13]:
            raise ValueError("unlucky")
        self.seeds.append(seed)
        self.requests[number] = (list(prompt_ids), params["max_tokens"])

    def abort(self, number: int) -> None:
        self.requests.pop(number, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Event]:
        events = []
        for number, (tokens, left) in list(self.requests.items()):
            token = tokens[-1] + self.version
            self.requests[number] = ([*tokens, token], left - 1)
            reason = "length" if left == 1 else "abort" if tokens == [14] else None
            if reason:
                del self.requests[number]
            events.append(Event(number, [token], [0.0], self.version, reason))
        return events

    def load_bucket(self, bucket: Any, first: bool) -> None:
        assert sum(1 for _ in read_bucket(bucket)) > 0
        self.buckets += 1

    def use_weights(self, version: int, adapter: Any) -> None:
        self.version = version
        self.pushes.append(version)
        if adapter is not None:
            check_adapter(adapter)
            self.adapters.append(adapter["path"])

    def score(self, prompt_ids: list[int]) -> list[float]:
        return self.told

    def sleep(self) -> bool:
        return True

    def wake_up(self, part: str | None) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def rollout(engine: CountingEngine, llama: torch.nn.Module, config: Any) -> EngineRollout:
    weights = EngineWeights(1, WeightFiles(torch.float32, 1000))
    made = EngineRollout("vllm", config(name="vllm"), llama, CPU, [engine], weights, torch.float32)
    made.load_weights([("w", torch.ones(3))], 1)
    return made


def request(*prompt: int, tokens: int = 3, **params: Any) -> Request:
    return Request(list(prompt), SamplingParams(tokens, **params), 0)


def test_tokens_come_back(rollout: EngineRollout) -> None:
    first, second = rollout.generate([request(5), request(7, 8, tokens=2)])
    assert (first.token_ids, second.token_ids) == ([6, 7, 8], [9, 10])
    assert first.weight_versions == ((1, 3),) and first.finish_reason == "length"
    assert not rollout.has_work()


def test_weights_go_over_once(rollout: EngineRollout, engine: CountingEngine) -> None:
    rollout.generate([request(5)])
    rollout.generate([request(5)])
    assert engine.pushes == [1]


def test_a_request_goes_on_with_new_weights(rollout: EngineRollout) -> None:
    found: dict[int, Any] = {}
    number = rollout.add(request(5, tokens=4), None, found.__setitem__)
    with rollout.stepping():
        rollout.step()
    rollout.load_weights([("w", torch.ones(3))], 10)
    with rollout.stepping():
        while rollout.has_work():
            rollout.step()
    assert found[number].token_ids == [6, 16, 26, 36]
    assert found[number].weight_versions == ((1, 1), (10, 3))


def test_what_a_sleeper_forgets_is_brought_again(
    rollout: EngineRollout, engine: CountingEngine
) -> None:
    rollout.generate([request(5)])
    rollout.sleep()
    with pytest.raises(RolloutError, match="sleeps"):
        rollout.generate([request(5)])
    rollout.wake_up()
    rollout.generate([request(5)])
    assert engine.pushes == [1, 1]


def test_a_probe_must_agree(rollout: EngineRollout, engine: CountingEngine) -> None:
    rollout.expect(Probe([1, 2, 3], [-1.0, -2.001]))
    rollout.generate([request(5)])
    rollout.load_weights([("w", torch.ones(3))], 2)
    rollout.expect(Probe([1, 2, 3], [-1.0, -2.5]))
    with pytest.raises(RolloutError, match=r"differ by 0\.25 on average.*No sample was drawn"):
        rollout.generate([request(5)])
    assert not engine.requests and not rollout.has_work()


def test_nan_agrees_with_nothing() -> None:
    with pytest.raises(RolloutError, match="nan"):
        Probe([1, 2], [-1.0]).check([float("nan")], torch.float32, "vllm")


def test_stop_strings_end_a_request_here(rollout: EngineRollout, engine: CountingEngine) -> None:
    rollout.decode = lambda tokens: "".join(f"<{token}>" for token in tokens)
    found = rollout.generate([request(5, tokens=9, stop=("<7>",))])[0]
    assert (found.token_ids, found.finish_reason) == ([6, 7], "stop")
    assert not engine.requests


def test_an_aborted_request_has_what_there_was(rollout: EngineRollout) -> None:
    number = rollout.add(request(5, tokens=9))
    with rollout.stepping():
        rollout.step()
    found = rollout.abort(number)
    assert found is not None and (found.token_ids, found.finish_reason) == ([6], "abort")
    assert rollout.abort(number) is None and not rollout.has_work()


# ---- weights


def test_buckets_hold_every_weight(tmp_path: Path) -> None:
    weights = {f"w{n}": torch.randn(n + 1, 7) for n in range(9)}
    files = WeightFiles(torch.bfloat16, bucket_bytes=200, root=tmp_path)
    files.write(weights.items())
    assert len(files.buckets) > 3
    found = {name: weight for bucket in files.buckets for name, weight in read_bucket(bucket)}
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    files.write([("w", torch.zeros(2))])
    assert len(list(tmp_path.glob("*/*"))) == 1
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_was_changed_is_found_out(tmp_path: Path) -> None:
    files = WeightFiles(torch.float32, bucket_bytes=1000, root=tmp_path)
    files.write([("w", torch.ones(100))])
    path = Path(files.buckets[0]["path"])
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(ValueError, match="checksum"):
        list(read_bucket(files.buckets[0]))


# ---- adapters


@pytest.fixture
def with_adapter(engine: CountingEngine, adapted: Any, config: Any) -> EngineRollout:
    shape = adapter_shape(adapted)
    assert shape is not None
    files = WeightFiles(torch.float32, 1 << 20)
    weights = EngineWeights(1, files, AdapterFolders(shape))
    return EngineRollout(
        "vllm", config(name="vllm"), adapted, CPU, [engine], weights, torch.float32
    )


def test_an_adapter_goes_over_alone(
    with_adapter: EngineRollout, engine: CountingEngine, adapted: Any
) -> None:
    rollout = with_adapter
    for version in (1, 2):
        rollout.update(ModuleWeights(adapted), version)
        rollout.generate([request(5)])
    assert engine.pushes == [1, 2] and engine.buckets == 1
    assert len(set(engine.adapters)) == 2
    assert not Path(engine.adapters[0]).exists() and Path(engine.adapters[1]).exists()
    rollout.sleep()
    rollout.wake_up()
    rollout.generate([request(5)])
    assert engine.pushes == [1, 2, 2] and engine.buckets == 2
    rollout.load_weights([("w", torch.ones(3))], 3)  # without an adapter, which is gone then
    rollout.generate([request(5)])
    rollout.update(ModuleWeights(adapted), 4)
    rollout.generate([request(5)])
    assert engine.buckets == 4 and len(set(engine.adapters)) == 3
    rollout.close()
    assert not Path(engine.adapters[-1]).parent.exists()


# ---- folders


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = own_folder("kind", tmp_path)
    of_gone = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{gone.pid}-")
    elsewhere = tmp_path / f"kind-1-{gone.pid}-x"  # of another container
    of_gone.mkdir()
    elsewhere.mkdir()
    other = own_folder("kind", tmp_path)
    assert set(tmp_path.iterdir()) == {mine, elsewhere, other}


def test_closing_leaves_nothing(
    engine: CountingEngine, llama: torch.nn.Module, config: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    files = WeightFiles(torch.float32, 1000)
    weights = EngineWeights(1, files)
    made = EngineRollout(
        "vllm", config(name="vllm"), llama, CPU, [engine], weights, torch.float32, folder
    )
    made.load_weights([("w", torch.ones(3))], 1)
    written = Path(files.buckets[0]["path"])
    assert written.exists()
    made.close()
    assert not written.parent.exists() and not folder.exists()


# ---- requests that fail


@pytest.mark.parametrize("prompt", [13, 14])
def test_a_request_that_fails_does_so_alone(
    rollout: EngineRollout, engine: CountingEngine, prompt: int
) -> None:
    with pytest.raises(RolloutError, match=r"vllm refuses a request: (unlucky|.*'abort')"):
        rollout.generate([request(5), request(prompt)])
    assert not rollout.has_work() and not engine.requests

    async def both() -> list[Any]:
        async with AsyncSampler(rollout) as sampler:
            asked = [sampler.generate(request(token)) for token in (5, prompt)]
            return await asyncio.gather(*asked, return_exceptions=True)

    fine, failed = asyncio.run(both())
    assert fine.token_ids == [6, 7, 8] and isinstance(failed, RolloutError)


def test_a_stream_that_cannot_go_on_fails_alone(rollout: EngineRollout) -> None:
    found: dict[int, Any] = {}
    told: list[int] = []
    streamed = rollout.add(
        request(5, tokens=4, presence_penalty=1.0), lambda _, token, __: told.append(token)
    )
    other = rollout.add(request(5, tokens=2), None, found.__setitem__)
    with rollout.stepping():
        rollout.step()
    rollout.load_weights([("w", torch.ones(3))], 10)
    with rollout.stepping():
        rollout.step()
    assert list(rollout.take_failures()) == [streamed] and told == [6]
    assert found[other].token_ids == [6, 16] and not rollout.has_work()


def test_what_dies_with_an_engine_is_counted(
    rollout: EngineRollout, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A stream whose penalties count what was told cannot go on."""
    found: dict[int, Any] = {}
    streamed = rollout.add(request(5, tokens=4, presence_penalty=1.0), lambda *_: None)
    others = [rollout.add(request(5, tokens=4), None, found.__setitem__) for _ in range(2)]
    with rollout.stepping():
        rollout.step()
        with monkeypatch.context() as dying:
            dying.setattr(engine, "step", Mock(side_effect=EngineDied("killed")))
            dying.setattr(rollout, "_process", lambda _: Mock(start=engine.requests.clear))
            rollout.step()
        assert list(rollout.take_failures()) == [streamed]
        while rollout.has_work():
            rollout.step()
    assert sorted(found) == others and rollout.restarts == 1
    assert "killed; requests that go on: 2, lost: 1" in caplog.text


def test_what_goes_on_draws_other_numbers(rollout: EngineRollout, engine: CountingEngine) -> None:
    rollout.add(request(5, tokens=4))
    for version in (2, 3):
        with rollout.stepping():
            rollout.step()
        rollout.load_weights([("w", torch.ones(3))], version)
    with rollout.stepping():
        rollout.step()
    assert len(set(engine.seeds)) == 3 and engine.seeds[0] == 0


# ---- routing


def test_requests_go_where_there_are_fewest() -> None:
    sessions, load = Sessions(), [0, 0, 0]
    for expected in (0, 1, 2, 0):
        place = sessions.home(None, load)
        assert place == expected
        load[place] += 1
    assert sessions.home(None, [2, 0, 1]) == 1


def test_a_session_stays_where_it_is() -> None:
    sessions = Sessions()
    assert (sessions.home("a", [0, 0]), sessions.home("b", [1, 0])) == (0, 1)
    assert sessions.home("a", [3, 1]) == 0


def test_old_sessions_are_forgotten() -> None:
    sessions = Sessions(remembered=1)
    assert (sessions.home("a", [0, 0]), sessions.home("b", [1, 0])) == (0, 1)
    sessions.home("c", [1, 1])
    assert sessions.home("b", [0, 1]) == 0


# ---- arguments


def test_without_the_engine_it_is_said_what_to_do(
    monkeypatch: pytest.MonkeyPatch, llama: torch.nn.Module, config: Callable[..., RolloutConfig]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("vllm", "sglang"):
        with pytest.raises(UnsupportedError, match=rf"name='{name}'.*engine_python=/path"):
            ROLLOUTS[name](config(name=name), llama, CPU)


def test_arguments_of_the_engine_win(config: Callable[..., RolloutConfig]) -> None:
    given = config(dtype="float32", engine_kwargs={"vllm": {"block_size": 64, "seed": None}})
    arguments = engine_arguments("vllm", given, "/m", None)
    assert (arguments["block_size"], arguments["seed"]) == (64, 42)
    assert (arguments["max_model_len"], arguments["tensor_parallel_size"]) == (128, 1)
    fixed = config(engine_kwargs={"sglang": {"load_format": "auto"}})
    with pytest.raises(ConfigError, match=r"engine_kwargs\.sglang\.load_format='auto'"):
        engine_arguments("sglang", fixed, "/m", None)


def test_an_engine_has_no_more_gpus_than_its_ranks(config: Callable[..., RolloutConfig]) -> None:
    given = config(tensor_model_parallel_size=2)
    assert engine_arguments("vllm", given, "/m", 2)["tensor_parallel_size"] == 2
    with pytest.raises(UnsupportedError, match=r"tensor_model_parallel_size=2: .* sees 1 GPU"):
        engine_arguments("vllm", given, "/m", 1)


def test_seeds_differ_by_rank_and_replica() -> None:
    seeds = {reseeded("sglang", {SEED: 42}, *path)[SEED] for path in ((0, 0), (0, 1), (1, 0))}
    assert len(seeds) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    assert reseeded("vllm", {"seed": 42}, 1, 1) == {"seed": 42}
