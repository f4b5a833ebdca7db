"""The bundle of a run: what it holds, and what `caldera repeat` says of it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from caldera.commands.repeat import command_of, differences, main
from caldera.config.offline import EvaluationConfig
from caldera.errors import DataError
from caldera.trainer import bundle
from caldera.trainer.bundle import fingerprint, read_bundle, write_bundle

OUTPUT_KEY = "evaluation.output_dir"


@pytest.fixture
def config(tmp_path: Path) -> EvaluationConfig:
    config = EvaluationConfig()
    config.data.path = str(tmp_path / "answers.parquet")
    Path(config.data.path).write_bytes(b"some answers")
    config.custom_reward_function.path = str(tmp_path / "score.py")
    Path(config.custom_reward_function.path).write_text("def compute_score(): ...\n")
    return config


@pytest.fixture
def run(tmp_path: Path, config: EvaluationConfig) -> Path:
    write_bundle(tmp_path / "run/bundle", config, OUTPUT_KEY)
    return tmp_path / "run"


def rewrite(run: Path, **changes: Any) -> None:
    file = run / "bundle/bundle.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_bundle_holds_what_a_repetition_needs(run: Path, config: EvaluationConfig) -> None:
    bundle = read_bundle(run)
    assert bundle["command"] == sys.orig_argv
    assert bundle["packages"]["torch"] and bundle["python"] and bundle["platform"]
    assert set(bundle["files"]) == {"data.path", "custom_reward_function.path"}
    assert bundle["files"]["data.path"] == {
        config.data.path: fingerprint(Path(config.data.path or ""))
    }
    assert f"path: {config.data.path}" in (run / "bundle/config.yaml").read_text()
    assert read_bundle(run / "bundle") == read_bundle(run / "bundle/bundle.json") == bundle


def test_secrets_stay_out(
    tmp_path: Path, config: EvaluationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("HF_HUB_TOKEN", "secret-text")
    monkeypatch.setenv("WANDB_API_KEY", "secret-text")
    folder = write_bundle(tmp_path / "b", config, OUTPUT_KEY)
    assert read_bundle(folder)["environment"]["VERL_LOGGING_LEVEL"] == "INFO"
    assert "secret-text" not in (folder / "bundle.json").read_text()


def test_what_has_changed_is_told(run: Path, config: EvaluationConfig) -> None:
    assert list(differences(read_bundle(run))) == []
    Path(config.data.path or "").write_bytes(b"some Answers")
    Path(config.custom_reward_function.path or "").unlink()
    packages = read_bundle(run)["packages"] | {"torch": "0.1", "gone": "1"}
    rewrite(run, packages=packages, python="2.7")
    lines = list(differences(read_bundle(run)))
    assert f"data.path: {config.data.path} has changed" in lines
    assert f"custom_reward_function.path: {config.custom_reward_function.path} is gone" in lines
    assert "package gone: was 1, is not there" in lines
    assert any(line.startswith("package torch: was 0.1, is ") for line in lines)
    assert any(line.startswith("python: was 2.7, is ") for line in lines)
    assert len(lines) == 5


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "BLOCK", 4)
    monkeypatch.setattr(bundle, "HASHED_WHOLE", 8)
    file = tmp_path / "weights"
    data = bytearray(range(200))
    file.write_bytes(data)
    first = fingerprint(file)
    assert first["bytes"] == 200 and "sha256" not in first
    data[-1] = 0
    file.write_bytes(data)
    assert fingerprint(file)["sampled_sha256"] != first["sampled_sha256"]


def test_repeat_shows_and_runs_the_command(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; print('ran', sys.argv[1:]); sys.exit(3)"
    rewrite(run, command=[sys.executable, "-c", script], directory=str(tmp_path))
    assert command_of(read_bundle(run), "there")[-1] == f"{OUTPUT_KEY}=there"
    assert main([str(run)]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("nothing has changed\n") and "ran [" not in shown
    assert main([str(run), "--output", "there", "--run"]) == 3
    assert f"ran ['{OUTPUT_KEY}=there']" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}'])
def test_what_is_no_bundle_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="no bundle"):
        read_bundle(tmp_path)
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(DataError, match="no bundle"):
        read_bundle(tmp_path)


def test_functions_of_files_and_unreadable_files(tmp_path: Path) -> None:
    @dataclass
    class Keys:
        adv_estimator: str = f"{tmp_path}/own.py:advantage"
        data_path: str = str(tmp_path / "x") * 2000  # longer than any name of a file

    (tmp_path / "own.py").write_text("def advantage(): ...\n")
    files = bundle.fingerprints(Keys())
    assert "sha256" in files["adv_estimator"][f"{tmp_path}/own.py"]
    assert fingerprint(tmp_path / "gone") == {"unreadable": "No such file or directory"}
    assert all(list(read) == ["unreadable"] for read in files["data_path"].values())


def test_repeat_tells_variables_and_sets_them(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = read_bundle(run)
    environment = {**bundle["environment"], "VERL_THEN": "a b"}
    script = "import os; print('ran', os.environ.get('VERL_THEN'), os.environ.get('VERL_NOW'))"
    command = [sys.executable, "-c", script]
    rewrite(run, environment=environment, command=command, directory=str(tmp_path))
    monkeypatch.setenv("VERL_NOW", "1")
    assert main([str(run), "--run"]) == 0
    shown = capfd.readouterr().out
    assert "variable VERL_NOW: was not set, is '1'" in shown
    assert "variable VERL_THEN: was 'a b', is not set" in shown
    assert "unset VERL_NOW\nexport VERL_THEN='a b'\n" in shown
    assert "ran a b None" in shown


def test_a_command_of_torchruns_starts_all_processes(
    tmp_path: Path, config: EvaluationConfig, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "caldera.x", "a=1"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    start = ["python", "-m", "torch.distributed.run"]
    bundle = read_bundle(write_bundle(tmp_path / "one", config, OUTPUT_KEY))
    rest = ["--nproc_per_node=4", "-m", "caldera.x", "a=1"]
    assert bundle["command"] == [*start, "--standalone", *rest] and bundle["nodes"] == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    folder = write_bundle(tmp_path / "two", config, OUTPUT_KEY)
    assert read_bundle(folder)["command"] == [*start, "--nnodes=2", *rest]
    assert main([str(folder), "--run"]) == 2
    assert "by torchrun on 2 machines" in capfd.readouterr().err


def test_variables_of_a_driver_elsewhere_are_those_that_it_was_given(
    tmp_path: Path, config: EvaluationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALDERA_COMMAND", '["caldera", "train"]')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "INFO")
    bundle = read_bundle(write_bundle(tmp_path, config, OUTPUT_KEY))
    assert bundle["command"] == ["caldera", "train"]
    assert "CUDA_VISIBLE_DEVICES" not in bundle["environment"]
    assert bundle["environment"]["VERL_LOGGING_LEVEL"] == "INFO"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not any("CUDA" in line for line in differences(bundle))
