"""`caldera generate` that is killed, and what must hold of it with vLLM and SGLang alike: as
samplers of the run's own, and as servers elsewhere."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from caldera.commands.generation import generate
from caldera.config import RolloutConfig, compose_config
from caldera.config.offline import GenerationConfig, check_generation
from caldera.config.samplers import RemoteConfig
from caldera.demo import smollm2
from caldera.models.attention import ATTENTION
from caldera.rollout import ROLLOUTS, Completion, RemoteRollout, Request, SamplingParams
from tests.engine_trials import assert_same, python_of

ROWS, SAMPLES = 6, 2
SECONDS = 250.0
CPU = torch.device("cpu")
PROGRAM = """
import sys
from caldera.commands.generation_samplers import Samplers
from caldera.commands.generate import main
plain = Samplers.answers
Samplers.answers = lambda self, rows: (sys.stdin.readline(), plain(self, rows))[1]
sys.exit(main())
"""
"""Slow enough to be killed in its midst: it waits for a line before each batch."""


def killed_run(lab: Any, overrides: Sequence[str], parts: Path, batches: int) -> list[Path]:
    """Kill a run once it has written so many batches; returns their files. Nothing that it has
    started stays behind."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *overrides], env=lab.environment, stdin=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(b"\n" * batches)
        process.stdin.flush()
        deadline = time.monotonic() + SECONDS
        while len(list(parts.glob("rows-*.parquet"))) < batches:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    while lab.processes_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return sorted(parts.glob("rows-*.parquet"))


def free_port() -> int:
    """Of those that no connection gets by chance, since a server takes a while to listen there."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def responses(file: Path) -> list[list[str]]:
    found: list[list[str]] = pyarrow.parquet.read_table(file)["responses"].to_pylist()
    return found


@dataclass(frozen=True)
class OwnServer:
    """The server that an engine brings along, which may still be starting."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait(self) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            try:
                if httpx2.get(f"{self.url}/health", timeout=20).status_code == 200:
                    return
            except httpx2.TransportError:
                time.sleep(0.2)


class GenerationTrials:
    """To be subclassed, with the engine's name and the command of its server."""

    name: str
    server_arguments: Sequence[str]
    """Behind the engine's Python; {model} and {port} are filled in."""
    server_environment: ClassVar[Mapping[str, str]]

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls) -> Path:
        return smollm2.materialise()

    @pytest.fixture(scope="class")
    @classmethod
    def starting(
        cls, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[OwnServer]:
        port = free_port()
        log = tmp_path_factory.mktemp("server") / "log"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    python_of(cls.name),
                    *(each.format(model=folder, port=port) for each in cls.server_arguments),
                ],
                env={**environment, **cls.server_environment}, start_new_session=True,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        yield OwnServer(process, f"http://127.0.0.1:{port}", log)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @pytest.fixture
    def server(self, starting: OwnServer) -> OwnServer:
        starting.wait()
        return starting

    @pytest.fixture
    def given(self, folder: Path, tmp_path: Path) -> list[str]:
        """The arguments of a run, but for who samples."""
        questions = [[{"role": "user", "content": f"What is {row} + 2?"}] for row in range(ROWS)]
        table = pyarrow.table({"prompt": questions, "extra": list(range(ROWS))})
        pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
        return [
            f"model.path={folder}", f"data.path={tmp_path / 'in.parquet'}", "data.batch_size=2",
            f"data.output_path={tmp_path / 'out.parquet'}", f"data.n_samples={SAMPLES}",
            "rollout.prompt_length=64", "rollout.response_length=8", "rollout.max_num_seqs=16",
            "trainer.device=cpu",
        ]  # fmt: skip

    def test_a_killed_run_goes_on(
        self, starting: OwnServer, lab: Any, given: list[str], tmp_path: Path
    ) -> None:
        """Meanwhile the server starts."""
        assert_goes_on(
            lab, tmp_path,
            [*given, f"rollout.name={self.name}", f"rollout.engine_python={python_of(self.name)}"],
        )  # fmt: skip

    def test_a_killed_run_goes_on_with_a_server(
        self, server: OwnServer, lab: Any, given: list[str], tmp_path: Path
    ) -> None:
        assert_goes_on(
            lab, tmp_path, [*given, "rollout.name=remote", f"rollout.remote.url={server.url}"]
        )

    def test_chats_with_a_server(self, server: OwnServer, given: list[str], tmp_path: Path) -> None:
        overrides = [*given, f"rollout.url={server.url}/v1", "rollout.top_k=-1"]
        config = compose_config(overrides, "generation", None, GenerationConfig)
        check_generation(config)
        assert_whole(generate(config), tmp_path / "in.parquet")

    def test_what_a_server_tells_of_tokens(self, server: OwnServer, folder: Path) -> None:
        """Greedy, it says what the native sampler says, whatever ends it."""
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True, return_dict=False,
        )  # fmt: skip
        end = frozenset({tokenizer.eos_token_id})
        (capital,) = tokenizer.encode(" capital")
        requests = [
            Request(prompt, SamplingParams(24, 0.0, **more), 0)
            for more in (
                {"stop_token_ids": end},
                {"stop_token_ids": end, "ignore_eos": True},
                {"stop_token_ids": end | {capital}},
                {"stop_token_ids": end, "stop": ("France",)},
            )
        ]
        module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION
        )
        found: dict[str, list[Completion]] = {}
        for name, remote in (("native", RemoteConfig()), ("remote", RemoteConfig(server.url))):
            config = RolloutConfig(
                name=name, remote=remote, prompt_length=128, response_length=32, dtype="float32"
            )
            rollout = ROLLOUTS[name](config, module, CPU)
            rollout.decode = tokenizer.decode
            found[name] = rollout.generate(requests)
            if isinstance(rollout, RemoteRollout):
                rollout.close()
        assert_same(found["remote"], found["native"])
        reasons = [each.finish_reason for each in found["remote"]]
        assert reasons == ["stop", "length", "stop", "stop"]
        assert [len(each.token_ids) for each in found["remote"]] == [8, 24, 2, 4]


def assert_goes_on(lab: Any, folder: Path, overrides: list[str]) -> None:
    """A run that was killed is finished by the same command, and what it had stays as it was."""
    (kept,) = killed_run(lab, overrides, folder / "out.parquet.parts", batches=1)
    first = responses(kept)
    done = lab.run(["generate", *overrides], "caldera.cli")
    assert done.returncode == 0, done.stderr
    told = " ".join((done.stdout + done.stderr).split())
    assert f"2 of {ROWS} prompts have responses" in told and "ETA" in told
    assert_whole(folder / "out.parquet", folder / "in.parquet")
    assert responses(folder / "out.parquet")[:2] == first


def assert_whole(output: Path, questions: Path) -> None:
    """Every row is there once, with its columns and its answers."""
    after = pyarrow.parquet.read_table(output)
    assert after.drop_columns("responses").equals(pyarrow.parquet.read_table(questions))
    answers = responses(output)
    assert [len(texts) for texts in answers] == [SAMPLES] * ROWS
    assert all(text for texts in answers for text in texts)
    assert not output.with_name(f"{output.name}.parts").exists()
