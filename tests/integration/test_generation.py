"""`caldera generate`, in real processes, that are really killed, and against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from caldera.commands.generation import Parts, generate
from caldera.config import compose_config
from caldera.config.offline import GenerationConfig, check_generation
from caldera.errors import ConfigError, DataError, RolloutError
from caldera.rollout import remote
from caldera.trainer.bundle import read_bundle
from tests.generation_trials import killed_run, responses

ROWS, SAMPLES = 25, 3


def arguments(lab: Any, output: Path, *more: str) -> list[str]:
    return [
        f"model.path={lab.model}", f"data.path={lab.test_file}", f"data.output_path={output}",
        f"data.n_samples={SAMPLES}", "data.batch_size=4", "rollout.prompt_length=8",
        "rollout.response_length=4", "rollout.top_p=1", "trainer.device=cpu", *more,
    ]  # fmt: skip


def config_of(overrides: Sequence[str]) -> GenerationConfig:
    config = compose_config(overrides, "generation", None, GenerationConfig)
    check_generation(config)
    return config


def run(lab: Any, command: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = lab.run([command, *overrides], "caldera.cli")
    return done


@pytest.fixture(scope="module")
def reference(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nobody disturbs writes."""
    return generate(config_of(arguments(lab, tmp_path_factory.mktemp("whole") / "out.parquet")))


# ---------------------------------------------------------------------- samplers of the run's own


def test_columns_are_kept_and_answers_added(lab: Any, reference: Path) -> None:
    before, after = (pyarrow.parquet.read_table(file) for file in (lab.test_file, reference))
    assert after.drop_columns("responses").equals(before)
    answers = after["responses"].to_pylist()
    assert [len(texts) for texts in answers] == [SAMPLES] * ROWS
    assert len({text for texts in answers for text in texts}) > 5
    assert any(len(set(texts)) > 1 for texts in answers)  # the samples of a prompt differ
    assert not reference.with_name("out.parquet.parts").exists()
    bundle = read_bundle(reference.with_name("out.parquet.bundle"))
    assert bundle["output_key"] == "data.output_path"
    assert list(bundle["files"]["data.path"]) == [str(lab.test_file)]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_file(lab: Any, reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    parts = tmp_path / "out.parquet.parts"
    given = arguments(lab, output, "data.batch_size=1")
    whole = generate(config_of(arguments(lab, tmp_path / "whole.parquet", "data.batch_size=1")))
    killed_run(lab, [*given, "trainer.n_gpus_per_node=2"], parts, batches=5)
    (parts / ".rows-000000005-000000006.parquet.tmp").write_bytes(b"half of a file")
    kept = {file.name: file.stat().st_mtime_ns for file in parts.glob("rows-*.parquet")}
    assert len(kept) == 5 and not output.exists()

    differing = run(lab, "generate", *given, "rollout.temperature=0.5")
    assert differing.returncode == 2
    assert "rollout.temperature was 1.0 there and is 0.5 here" in differing.stderr
    assert "remove the folder" in differing.stderr and "Traceback" not in differing.stderr
    assert {f.name: f.stat().st_mtime_ns for f in parts.glob("rows-*.parquet")} == kept

    done = run(lab, "generate", *given)
    assert done.returncode == 0, done.stderr
    assert "5 of 25 prompts have responses" in " ".join((done.stdout + done.stderr).split())
    assert "ETA" in done.stdout
    assert output.read_bytes() == whole.read_bytes()
    assert responses(output) == responses(reference)  # which has batches of four
    assert not parts.exists()


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number_of_processes(
    lab: Any, reference: Path, tmp_path: Path
) -> None:
    """Batches of four for three ranks do not divide, and the last has one prompt."""
    output = tmp_path / "folder/out.parquet"
    done = run(lab, "generate", *arguments(lab, output, "trainer.n_gpus_per_node=3"))
    assert done.returncode == 0, done.stderr
    assert responses(output) == responses(reference)
    assert sorted(output.parent.iterdir()) == [output, output.with_name(f"{output.name}.bundle")]


def test_answers_of_hf_do_not_depend_on_the_batch_size(lab: Any, tmp_path: Path) -> None:
    found = [
        responses(generate(config_of(arguments(
            lab, tmp_path / f"{size}.parquet", "rollout.name=hf", f"data.batch_size={size}",
        ))))
        for size in (3, 25)
    ]  # fmt: skip
    assert found[0] == found[1]
    assert any(len(set(texts)) > 1 for texts in found[0])


@pytest.mark.slow
def test_what_is_generated_can_be_evaluated(lab: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    greedy = ("data.n_samples=1", "rollout.temperature=0")
    assert run(lab, "generate", *arguments(lab, output, *greedy)).returncode == 0
    done = run(lab, "eval", f"data.path={output}", "evaluation.num_workers=1")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "out.evaluation.json").read_text()).values()
    truths = pyarrow.parquet.read_table(output)["reward_model"].to_pylist()
    pairs = zip(truths, responses(output), strict=True)
    right = sum(truth["ground_truth"] == text for truth, (text,) in pairs)
    assert 0 < right < ROWS
    assert found["measures"]["mean@1"]["value"] == pytest.approx(right / ROWS)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("rollout.temperature=0",), "data.n_samples=3: with rollout.temperature=0"),
        (("rollout.name=trtllm",), "rollout.name='trtllm' is not part of this release"),
        (("rollout.engine_python=/p",), "rollout.engine_python='/p': takes rollout.name=vllm"),
        (("rollout.name=remote",), "rollout.remote.url=null with rollout.name=remote"),
        (("data.output_path=out.csv",), "data.output_path='out.csv'"),
        (("model.path=null",), "model.path is required"),
        (("rollout.url=host:8000",), "takes an address such as"),
        (("rollout.url=http://host:8000",), "rollout.top_k=50"),
        (("rollout.url=http://host:8000", "rollout.name=hf"), "rollout.name='hf'"),
        (("trainer.n_gpus_per_node=1", "rollout.name=nativ"), "takes one of hf, native, remote"),
    ],
)
def test_keys_that_do_not_fit(lab: Any, tmp_path: Path, more: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        generate(config_of(arguments(lab, tmp_path / "out.parquet", *more)))


def test_several_nodes_are_not_one(lab: Any, tmp_path: Path) -> None:
    more = ("trainer.nnodes=2", "trainer.worker_group=local")
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2 nodes need 'ray'"):
        generate(config_of(arguments(lab, tmp_path / "out.parquet", *more)))


def test_a_server_needs_no_nodes(lab: Any, tmp_path: Path) -> None:
    more = ("rollout.url=http://127.0.0.1:1", "rollout.top_k=-1", "trainer.nnodes=2")
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2: the server at rollout\.url samples"):
        config_of(arguments(lab, tmp_path / "out.parquet", *more))


def test_two_runs_do_not_write_one_file(lab: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    with Parts(output, ROWS, 4).locked():
        with pytest.raises(ConfigError, match="another run is writing it"):
            generate(config_of(arguments(lab, output)))
        assert not output.exists()
    assert responses(generate(config_of(arguments(lab, output))))


def test_a_folder_that_went_away_with_its_lock_is_made_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out.parquet", ROWS, 4)
    with parts.locked():
        shutil.rmtree(parts.folder)
        with parts.locked():  # of another folder, under the same name
            assert parts.folder.is_dir()


def test_prompts_that_cannot_be_answered(lab: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    with pytest.raises(DataError, match=r"row 0 of .*more than rollout.prompt_length=2"):
        generate(config_of(arguments(lab, output, "rollout.prompt_length=2")))
    answered = tmp_path / "answered.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": [[{"role": "user", "content": "1+1"}]], "responses": ["2"]}),
        answered,
    )
    with pytest.raises(DataError, match="has a column 'responses' already"):
        generate(config_of(arguments(lab, output, f"data.path={answered}")))


def test_an_input_that_has_changed_is_told(lab: Any, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1"}]} for i in range(3)]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = arguments(lab, output, f"data.path={file}", "rollout.prompt_length=2")
    with pytest.raises(DataError):  # after the folder was begun
        generate(config_of(given))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with pytest.raises(ConfigError, match=r"the SHA-256 of data\.path was"):
        generate(config_of(given))


# ---------------------------------------------------------------------- a server


class ChatServer:
    """Answers like a chat server, but for the troubles that it is told to make."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.failures: dict[str, list[int]] = {}
        """Statuses to answer first, by prompt."""
        self.broken_prompt: str | None = None
        self.lock = threading.Lock()
        self.busy = self.most_busy = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.busy += 1
                    outer.most_busy = max(outer.busy, outer.most_busy)
                time.sleep(0.02)
                status, answer = outer.answer(self.path, body)
                with outer.lock:
                    outer.busy -= 1
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = body["messages"][-1]["content"]
        if path != "/v1/chat/completions":
            return 404, {"error": path}
        with self.lock:
            self.requests.append(body)
            left = self.failures.get(prompt, [])
            if left:
                return left.pop(0), {"error": "not now"}
        if prompt == self.broken_prompt:
            return 503, {"error": "out of order"}
        texts = [f"{prompt}/{body['seed']}/{i}" for i in range(body["n"])]
        choices = [{"index": i, "message": {"content": text}} for i, text in enumerate(texts)]
        return 200, {"choices": choices[::-1]}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(remote, "ATTEMPTS", 4)
    server = ChatServer()
    yield server
    server.close()


def questions_of(lab: Any) -> list[str]:
    prompts = pyarrow.parquet.read_table(lab.test_file)["prompt"].to_pylist()
    return [messages[-1]["content"] for messages in prompts]


def test_a_server_answers(lab: Any, tmp_path: Path, chat: ChatServer) -> None:
    prompts = questions_of(lab)
    chat.failures = {prompts[3]: [500, 429], prompts[9]: [503, 503, 408]}
    given = arguments(
        lab, tmp_path / "out.parquet", f"rollout.url={chat.url}/v1", "rollout.top_k=-1",
        "model.path=some/name", "rollout.temperature=0.7", "rollout.max_num_seqs=7",
        "data.batch_size=10", "rollout.stop=[END]", "rollout.presence_penalty=0.5",
    )  # fmt: skip
    found = responses(generate(config_of(given)))
    assert [[text.split("/")[0] for text in texts] for texts in found] == [
        [prompt] * SAMPLES for prompt in prompts
    ]
    assert [[text.split("/")[2] for text in texts] for texts in found] == [["0", "1", "2"]] * ROWS
    assert len(chat.requests) == ROWS + 5
    assert len({request["seed"] for request in chat.requests}) == ROWS
    first = chat.requests[0]
    assert {key: first[key] for key in ("model", "n", "temperature", "top_p", "max_tokens")} == {
        "model": "some/name", "n": 3, "temperature": 0.7, "top_p": 1, "max_tokens": 4,
    }  # fmt: skip
    assert (first["stop"], first["presence_penalty"]) == (["END"], 0.5)
    assert "frequency_penalty" not in first
    assert chat.most_busy == 2  # seven answers at a time, three a request


def test_a_server_that_fails_ends_the_run(lab: Any, tmp_path: Path, chat: ChatServer) -> None:
    prompts = questions_of(lab)
    output = tmp_path / "out.parquet"
    given = arguments(lab, output, f"rollout.url={chat.url}", "rollout.top_k=-1")
    chat.broken_prompt = prompts[10]
    with pytest.raises(RolloutError, match=r"row 10 in 4 attempts: status 503: .*out of order"):
        generate(config_of(given))
    assert len(list((tmp_path / "out.parquet.parts").glob("rows-*.parquet"))) == 2
    before = len(chat.requests)
    chat.broken_prompt = None
    generate(config_of(given))
    again = [request["messages"][-1]["content"] for request in chat.requests[before:]]
    assert sorted(again) == sorted(prompts[8:])  # not the batches that were finished
    whole = tmp_path / "whole.parquet"
    generate(config_of([*given, f"data.output_path={whole}"]))
    assert output.read_bytes() == whole.read_bytes()


def test_a_request_that_is_refused_is_not_tried_again(
    lab: Any, tmp_path: Path, chat: ChatServer
) -> None:
    chat.failures = {questions_of(lab)[0]: [400]}
    given = arguments(lab, tmp_path / "out.parquet", f"rollout.url={chat.url}", "rollout.top_k=-1")
    with pytest.raises(RolloutError, match="refuses the request, status 400"):
        generate(config_of([*given, "data.batch_size=1"]))
    assert len(chat.requests) == 1
