"""Weights in a buffer of one GPU that two processes share. The other one runs the host of engines,
with an engine of a few lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from caldera.config import RolloutConfig
from caldera.config.rollout import CheckpointEngineConfig
from caldera.errors import RolloutError
from caldera.rollout.engines.host.caldera_engine.buckets import Bucket
from caldera.rollout.engines.process import EngineProcess
from caldera.rollout.engines.rollout import _weights
from caldera.rollout.engines.weights import CudaBuckets, EngineWeights

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BUCKET = 32 << 20
HOST = """
import torch
from caldera_engine import __main__ as host
from caldera_engine.buckets import read_bucket

class Reader:
    def __init__(self, arguments):
        self.file, self.weights = arguments["file"], {}

    def has_work(self):
        return False

    def load_bucket(self, bucket, first):
        assert "cuda" in bucket
        if first:
            self.weights = {}
        self.weights |= dict(read_bucket(bucket))

    def use_weights(self, version, adapter):
        torch.save({name: weight.cpu() for name, weight in self.weights.items()}, self.file)

    def close(self):
        pass

host.build_engine = lambda name, arguments: Reader(arguments)
host.main()
"""


class Source:
    """Weights on the GPU and, as if offloaded, on the host; one is larger than a bucket."""

    is_whole = True

    def __init__(self) -> None:
        self.seed = 0

    def export_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator(CUDA).manual_seed(self.seed)
        for number in range(6):
            weight = torch.randn(1000, 5001, device=CUDA, generator=generator)
            yield f"w{number}", weight.cpu() if number == 2 else weight
        yield "large", torch.randn(4000, 6000, device=CUDA, generator=generator)

    def adapter_weights(self) -> dict[str, Tensor]:
        return {}

    def expected(self) -> dict[str, Tensor]:
        return {name: weight.bfloat16().cpu() for name, weight in self.export_weights()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "found.pt"


@pytest.fixture
def process(tmp_path: Path, file: Path) -> Iterator[EngineProcess]:
    (tmp_path / "host.py").write_text(HOST)
    python = tmp_path / "python"  # called with -m caldera_engine SOCKET NAME
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/host.py "$3" "$4"\n')
    python.chmod(0o755)
    made = EngineProcess(str(python), "vllm", {"file": str(file)}, {})
    yield made
    made.close()


@pytest.fixture
def weights(process: EngineProcess) -> Iterator[EngineWeights]:
    bucket = CheckpointEngineConfig(update_weights_bucket_megabytes=BUCKET >> 20)
    config = RolloutConfig(prompt_length=8, response_length=8, checkpoint_engine=bucket)
    made = _weights(config, torch.bfloat16, CUDA, [process], None, None)
    yield made
    made.close()


def assert_arrived(file: Path, source: Source) -> None:
    found, expected = torch.load(file), source.expected()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], weight)


def test_weights_arrive_and_memory_does_not_grow(
    process: EngineProcess, weights: EngineWeights, file: Path
) -> None:
    source, free = Source(), []
    for version in range(1, 6):
        source.seed = version
        weights.take(source)
        weights.push(0, process, version)
        assert_arrived(file, source)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(CUDA)[0])
    assert min(free[1:]) > free[0] - BUCKET, free


def test_they_come_again_after_a_restart(
    process: EngineProcess, weights: EngineWeights, file: Path
) -> None:
    source = Source()
    weights.take(source)
    weights.push(0, process, 1)
    assert not weights.lacking
    file.unlink()
    process.start()
    weights.lose(0)
    weights.push(0, process, 1)
    assert_arrived(file, source)


def test_what_was_changed_on_the_way_is_refused(process: EngineProcess, file: Path) -> None:
    class Changing:
        """Tells another checksum than that of what lies in the buffer."""

        def load_bucket(self, bucket: Bucket, first: bool) -> None:
            process.load_bucket({**bucket, "checksum": bucket["checksum"] + 1}, first)

    buckets = CudaBuckets(torch.bfloat16, BUCKET, CUDA)
    with pytest.raises(RolloutError, match="a buffer of the GPU have the checksum"):
        buckets.push(Source().export_weights(), Changing())  # type: ignore[arg-type]
    assert not file.exists()
    buckets.push(Source().export_weights(), process)
    process.use_weights(1, None)
    assert_arrived(file, Source())
