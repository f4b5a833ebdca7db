"""The bundle of a run: what it holds, and what `caldera repeat` says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from caldera.config.offline import EvaluationConfig
from caldera.errors import DataError
from caldera.trainer import bundle_files
from caldera.trainer.bundle import read_bundle, write_bundle
from caldera.trainer.bundle_files import fingerprint
from caldera.trainer.repeat import command_of, differences, main

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
    monkeypatch.setattr(bundle_files, "BLOCK", 4)
    monkeypatch.setattr(bundle_files, "HASHED_WHOLE", 8)
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
