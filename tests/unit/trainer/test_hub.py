"""Checkpoints are pushed to a hub on this machine; its failures are told and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from caldera.config import TrainerConfig
from caldera.trainer.checkpoint import CheckpointFolder
from caldera.trainer.hub import HubPushes
from tests.fake_hub import FakeHub, fake_hub

WHOLE = {
    "huggingface/config.json": "{}",
    "huggingface/model.safetensors": "weights",
    "huggingface/tokenizer.json": "{}",
}
ADAPTER = {
    "huggingface/config.json": "{}",
    "huggingface/tokenizer.json": "{}",
    "huggingface/chat_template.jinja": "{{ messages }}",
    "lora_adapter/adapter_config.json": "{}",
    "lora_adapter/adapter_model.safetensors": "adapter",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield running


def folder_of(root: Path, repository: str = "me/model", **keys: Any) -> CheckpointFolder:
    config = TrainerConfig(default_local_dir=str(root), push_to_hub=repository, **keys)
    checkpoints = CheckpointFolder(config)
    checkpoints.create()
    return checkpoints


def pushes_of(checkpoints: CheckpointFolder) -> HubPushes:
    pushes = checkpoints._pushes
    assert pushes is not None
    return pushes


def save(checkpoints: CheckpointFolder, step: int, files: dict[str, str]) -> None:
    def write(folder: Path) -> None:
        for name, text in files.items():
            file = folder / "actor" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("weights", f"weights {step}"))
        (folder / "data.pt").write_text("")

    checkpoints.save(step, write)


def test_the_model_of_each_checkpoint_is_pushed(
    tmp_path: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = folder_of(tmp_path, max_actor_ckpt_to_keep=1)
    with caplog.at_level(logging.INFO):
        for step in (10, 20):
            save(checkpoints, step, WHOLE)
            pushes_of(checkpoints).wait()
        checkpoints.close()
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert hub.repositories["me/model"].keys() == names
    assert hub.repositories["me/model"]["model.safetensors"] == b"weights 20"
    assert hub.private == {"me/model": True}
    assert hub.messages == ["Step 10", "Step 20"]
    assert hub.tokens == {"Bearer hf_secret"}
    assert f"pushed step 20 to {hub.url}/me/model" in caplog.messages
    assert checkpoints.metrics() == {"checkpoint/failed_pushes": 0}
    assert not list((tmp_path / ".pushing").iterdir())


def test_a_name_without_owner_is_the_users_own(tmp_path: Path, hub: FakeHub) -> None:
    checkpoints = folder_of(tmp_path, "model")
    save(checkpoints, 1, WHOLE)
    checkpoints.close()
    assert "model.safetensors" in hub.repositories["me/model"]


def test_an_adapter_goes_with_its_tokenizer(tmp_path: Path, hub: FakeHub) -> None:
    checkpoints = folder_of(tmp_path)
    save(checkpoints, 1, ADAPTER)
    checkpoints.close()
    assert hub.repositories["me/model"].keys() == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja",
    }  # fmt: skip


def test_a_merged_model_goes_before_its_adapter(tmp_path: Path, hub: FakeHub) -> None:
    checkpoints = folder_of(tmp_path)
    save(checkpoints, 1, ADAPTER | WHOLE)
    checkpoints.close()
    assert "adapter_config.json" not in hub.repositories["me/model"]
    assert "model.safetensors" in hub.repositories["me/model"]


def test_what_fails_is_told_with_the_command_and_tried_at_the_next_save(
    tmp_path: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = folder_of(tmp_path)
    hub.refusals = 1
    save(checkpoints, 1, WHOLE)
    pushes_of(checkpoints).wait()
    (warned,) = [text for text in caplog.messages if "could not be pushed" in text]
    assert warned.startswith("step 1 could not be pushed to me/model: HfHubHTTPError: ")
    by_hand = f"hf upload me/model {tmp_path}/global_step_1/actor/huggingface --private"
    assert warned.endswith(f"the run goes on. By hand: {by_hand}")
    assert checkpoints.metrics() == {"checkpoint/failed_pushes": 1}
    save(checkpoints, 2, WHOLE)
    checkpoints.close()
    assert hub.messages == ["Step 2"]


def test_a_hub_that_is_not_there_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    checkpoints = folder_of(tmp_path)
    save(checkpoints, 1, WHOLE)
    checkpoints.close()
    assert any("the repository cannot be written" in text for text in caplog.messages)
    assert any("step 1 could not be pushed" in text for text in caplog.messages)
    assert (tmp_path / "global_step_1").is_dir()
