"""Checkpoint folders: whole or not at all, found again, pruned."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from caldera.config import TrainerConfig
from caldera.errors import CheckpointError, WorkerError
from caldera.trainer.checkpoint import TRACKER, CheckpointFolder, step_of
from caldera.trainer.checkpoint_manifest import MANIFEST


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., CheckpointFolder]:
    def folder(**keys: object) -> CheckpointFolder:
        config = TrainerConfig(default_local_dir=str(tmp_path / "run"), **keys)  # type: ignore[arg-type]
        return CheckpointFolder(config)

    return folder


Make = Callable[..., CheckpointFolder]


def write(
    text: str = "weights", roles: tuple[str, ...] = ("actor", "critic")
) -> Callable[[Path], None]:
    def into(folder: Path) -> None:
        for role in roles:
            (folder / role).mkdir()
            (folder / role / "model.pt").write_text(text)
        (folder / "data.pt").write_text(text)

    return into


def fail(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "model.pt").write_text("half of it")
    raise OSError("the disk is full")


def names(checkpoints: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in checkpoints.root.iterdir())


def test_a_checkpoint_is_written_and_found(make: Make) -> None:
    checkpoints = make()
    assert checkpoints.to_resume() is None
    checkpoints.save(3, write())
    assert names(checkpoints) == ["global_step_3", TRACKER]
    assert (checkpoints.root / TRACKER).read_text().strip() == "3"
    found = make().to_resume()
    assert found == checkpoints.root / "global_step_3"
    assert step_of(found) == 3
    assert (found / "actor" / "model.pt").read_text() == "weights"


def test_the_newest_is_found_by_number(make: Make) -> None:
    checkpoints = make()
    for step in (9, 10):
        checkpoints.save(step, write())
    found = checkpoints.to_resume()
    assert found is not None
    assert step_of(found) == 10


def test_a_failing_write_leaves_no_checkpoint(make: Make) -> None:
    checkpoints = make()
    with pytest.raises(OSError, match="the disk is full"):
        checkpoints.save(1, fail)
    assert not (checkpoints.root / "global_step_1").exists()
    assert checkpoints.to_resume() is None


def test_a_full_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = make()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    told = f"no space left on the disk of {checkpoints.root} (3 MB free)"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        checkpoints.save(1, fail)

    def fail_in_rank(folder: Path) -> None:
        raise WorkerError("rank 1 of 2 failed")

    with pytest.raises(WorkerError) as raised:
        checkpoints.save(1, fail_in_rank)
    assert raised.value.__notes__ == [told]


def test_a_failing_write_leaves_the_last_checkpoint(make: Make) -> None:
    checkpoints = make()
    checkpoints.save(1, write("first"))
    with pytest.raises(OSError, match="the disk is full"):
        checkpoints.save(2, fail)
    with pytest.raises(OSError, match="the disk is full"):
        checkpoints.save(1, fail)
    assert (checkpoints.root / TRACKER).read_text().strip() == "1"
    found = checkpoints.to_resume()
    assert found == checkpoints.root / "global_step_1"
    assert (found / "actor" / "model.pt").read_text() == "first"
    assert not (checkpoints.root / "global_step_2").exists()
    checkpoints.save(2, write("second"))  # what the failed one left behind is not in the way
    assert names(checkpoints)[-3:] == ["global_step_1", "global_step_2", TRACKER]
    assert (checkpoints.root / "global_step_2" / "actor" / "model.pt").read_text() == "second"


def test_a_step_may_be_saved_again(make: Make) -> None:
    checkpoints = make()
    checkpoints.save(1, write("old", roles=("actor", "critic")))
    checkpoints.save(1, write("new", roles=("actor",)))
    assert names(checkpoints) == ["global_step_1", TRACKER]
    folder = checkpoints.root / "global_step_1"
    assert (folder / "actor" / "model.pt").read_text() == "new"
    assert not (folder / "critic").exists()


def test_all_are_kept_unless_told_otherwise(make: Make) -> None:
    checkpoints = make()
    for step in (1, 2, 3):
        checkpoints.save(step, write())
    assert names(checkpoints) == ["global_step_1", "global_step_2", "global_step_3", TRACKER]


def test_older_ones_are_pruned(make: Make) -> None:
    checkpoints = make(max_actor_ckpt_to_keep=2, max_critic_ckpt_to_keep=2)
    for step in (8, 9, 10, 11):
        checkpoints.save(step, write())
    assert names(checkpoints) == ["global_step_10", "global_step_11", TRACKER]


def test_roles_are_pruned_on_their_own(make: Make) -> None:
    checkpoints = make(max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, write())
    assert names(checkpoints) == ["global_step_2", "global_step_3", TRACKER]
    assert sorted(p.name for p in (checkpoints.root / "global_step_2").iterdir()) == [
        "critic",
        "data.pt",
        MANIFEST,
    ]


def test_a_run_without_critic_is_pruned(make: Make) -> None:
    checkpoints = make(max_actor_ckpt_to_keep=1)
    for step in (1, 2):
        checkpoints.save(step, write(roles=("actor",)))
    assert names(checkpoints) == ["global_step_2", TRACKER]


def test_other_files_of_the_run_stay(make: Make) -> None:
    checkpoints = make(max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=1)
    checkpoints.save(1, write())
    (checkpoints.root / "metrics.jsonl").write_text("{}")
    (checkpoints.root / "my_global_step_0").mkdir()
    checkpoints.save(2, write())
    assert names(checkpoints) == ["global_step_2", TRACKER, "metrics.jsonl", "my_global_step_0"]


def test_resuming_can_be_disabled(make: Make) -> None:
    make().save(1, write())
    assert make(resume_mode="disable").to_resume() is None


def test_resuming_from_a_path(make: Make, tmp_path: Path) -> None:
    checkpoints = make()
    for step in (1, 2):
        checkpoints.save(step, write())
    first = checkpoints.root / "global_step_1"
    chosen = make(resume_mode="resume_path", resume_from_path=str(first))
    assert chosen.to_resume() == first
    elsewhere = tmp_path / "copied" / "global_step_7"
    elsewhere.mkdir(parents=True)
    assert make(resume_mode="resume_path", resume_from_path=str(elsewhere)).to_resume() == elsewhere


def test_a_path_in_the_home_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "global_step_4").mkdir()
    chosen = make(resume_mode="resume_path", resume_from_path="~/global_step_4")
    assert chosen.to_resume() == tmp_path / "global_step_4"


@pytest.mark.parametrize("name", ["global_step_5", "actor"])
def test_a_path_that_is_no_checkpoint(make: Make, tmp_path: Path, name: str) -> None:
    (tmp_path / "actor").mkdir()
    path = tmp_path / name
    message = rf"^trainer\.resume_from_path='{path}' is not an existing folder named global_step_N$"
    with pytest.raises(CheckpointError, match=message):
        make(resume_mode="resume_path", resume_from_path=str(path)).to_resume()


@pytest.mark.parametrize("text", ["7", "seven", "", "\u00b2", "9" * 5000])
def test_a_tracker_that_leads_nowhere(make: Make, text: str) -> None:
    checkpoints = make()
    checkpoints.save(1, write())
    (checkpoints.root / TRACKER).write_text(text)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.to_resume()
    assert f"contains {text[:18]!r}, but there is no folder" in str(raised.value)
    assert "trainer.resume_mode=disable starts anew" in str(raised.value)


def test_pruning_spares_a_step_behind_which_the_run_went_back(make: Make) -> None:
    for step in (1, 2, 3):
        make().save(step, write())
    checkpoints = make(max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=1)
    checkpoints.save(2, write("again"))
    assert names(checkpoints) == ["global_step_2", TRACKER]
    found = checkpoints.to_resume()
    assert found is not None and (found / "data.pt").read_text() == "again"


def test_a_kill_between_the_renames_of_a_second_save_loses_nothing(make: Make) -> None:
    checkpoints = make()
    checkpoints.save(2, write("first"))
    final = checkpoints.root / "global_step_2"
    final.rename(checkpoints.root / ".replaced_global_step_2")
    found = make().to_resume()
    assert found == final and (found / "data.pt").read_text() == "first"


def test_starting_anew_forgets_the_tracker(make: Make) -> None:
    make().save(2, write())
    make(resume_mode="disable").create()
    assert make().to_resume() is None


def test_a_lost_tracker_is_made_up_for(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = make()
    for step in (9, 10):
        checkpoints.save(step, write())
    (checkpoints.root / TRACKER).unlink()
    (checkpoints.root / "global_step_11/critic").mkdir(parents=True)  # is not complete
    assert make().to_resume() == checkpoints.root / "global_step_10"
    assert f"{TRACKER} is missing: going on from the newest complete" in caplog.text
    assert (checkpoints.root / TRACKER).read_text() == "10"


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_reported_and_the_checkpoint_before_is_offered(make: Make) -> None:
    checkpoints = make()
    for step in (1, 2, 3):
        checkpoints.save(step, write())
    for step in (2, 3):
        flip_a_byte(checkpoints.root / f"global_step_{step}/actor/model.pt")
    with pytest.raises(CheckpointError) as raised:
        make().to_resume()
    assert "global_step_3/actor/model.pt has another checksum" in str(raised.value)
    first = checkpoints.root / "global_step_1"
    offered = f"trainer.resume_mode=resume_path trainer.resume_from_path={first} "
    assert offered in str(raised.value)
    assert make(resume_mode="resume_path", resume_from_path=str(first)).to_resume() == first


def test_a_fallback_to_the_checkpoint_before(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = make()
    for step in (1, 2):
        checkpoints.save(step, write())
    (checkpoints.root / "global_step_2/data.pt").unlink()
    assert make(resume_fallback=True).to_resume() == checkpoints.root / "global_step_1"
    assert "global_step_2/data.pt is missing: the checkpoint is damaged" in caplog.text
    (checkpoints.root / f"global_step_1/{MANIFEST}").write_text("{")
    with pytest.raises(CheckpointError, match="holds no earlier one that is intact"):
        make(resume_fallback=True).to_resume()


def test_a_checkpoint_without_a_manifest_is_read(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = make()
    checkpoints.save(1, write())
    (checkpoints.root / f"global_step_1/{MANIFEST}").unlink()
    assert make().to_resume() == checkpoints.root / "global_step_1"
    assert f"has no {MANIFEST}" in caplog.text


def test_what_is_logged_of_a_save_comes_before_the_checkpoint(make: Make) -> None:
    checkpoints = make()
    found: list[bool] = []

    def written() -> None:
        assert (checkpoints.root / f".partial_global_step_1/{MANIFEST}").is_file()
        found.append((checkpoints.root / "global_step_1").exists())

    checkpoints.save(1, write(), written)
    assert found == [False] and checkpoints.to_resume() is not None
