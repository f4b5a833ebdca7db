"""Copies of checkpoints behind a URL: complete or not named, retried, pruned, gone on from."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from caldera.config import TrainerConfig
from caldera.errors import CheckpointError, ConfigError
from caldera.storage import fetching
from caldera.trainer import remote_checkpoints
from caldera.trainer.checkpoint import TRACKER, CheckpointFolder

PATIENCE = 30.0


@dataclass
class Mood:
    """How the store behaves."""

    failures: int = 0
    """How many writes are still to fail."""
    is_down: bool = False
    before_put: Callable[[str], object] = lambda path: None
    written: list[str] = field(default_factory=list)


class MoodyFiles(LocalFileSystem):
    """A store that fails, or makes one wait, when it is told to: `moody:///folder`."""

    protocol = "moody"
    mood: ClassVar[Mood]

    def put_file(self, path1: str, path2: str, callback: Any = None, **kwargs: Any) -> None:
        self._fail_if_down()
        self.mood.before_put(path2)
        if self.mood.failures > 0:
            self.mood.failures -= 1
            raise OSError("the store is busy")
        super().put_file(path1, path2)
        self.mood.written.append(path2)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._fail_if_down()
        content: bytes = super().cat_file(path, *args, **kwargs)
        return content

    def _fail_if_down(self) -> None:
        if self.mood.is_down:
            raise RuntimeError("503\nof a library that knows no OSError")


@pytest.fixture(autouse=True)
def mood(monkeypatch: pytest.MonkeyPatch) -> Mood:
    fsspec.register_implementation("moody", MoodyFiles, clobber=True)
    MoodyFiles.mood = Mood()
    monkeypatch.setattr(remote_checkpoints, "DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(fetching, "DELAYS", (0.0,))
    return MoodyFiles.mood


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "store" / "run"


Make = Callable[..., CheckpointFolder]


@pytest.fixture
def make(tmp_path: Path, remote: Path) -> Iterator[Make]:
    made: list[CheckpointFolder] = []

    def folder(name: str = "local", **keys: Any) -> CheckpointFolder:
        keys = {"default_hdfs_dir": f"moody://{remote}", **keys}
        made.append(CheckpointFolder(TrainerConfig(default_local_dir=str(tmp_path / name), **keys)))
        made[-1].create()
        return made[-1]

    yield folder
    for checkpoints in made:
        checkpoints.close()


def write(text: str = "weights", roles: tuple[str, ...] = ("actor", "critic")) -> Any:
    def into(folder: Path) -> None:
        for role in roles:
            (folder / role / "deep").mkdir(parents=True)
            (folder / role / "model.pt").write_text(text)
            (folder / role / "deep" / "config.json").write_text("{}")
        (folder / "data.pt").write_text(text)

    return into


def save(checkpoints: CheckpointFolder, *steps: int, text: str = "weights") -> None:
    """Save, and wait for the upload."""
    for step in steps:
        checkpoints.save(step, write(text))
        checkpoints.close()


def content(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------- uploads


def test_a_checkpoint_is_copied_under_its_name(make: Make, remote: Path) -> None:
    checkpoints = make()
    save(checkpoints, 3)
    assert names(remote) == ["global_step_3", TRACKER]
    assert content(remote) == content(checkpoints.root)
    assert len(content(remote)) == 7
    assert checkpoints.metrics() == {"checkpoint/failed_uploads": 0}


def test_the_tracker_is_written_last(make: Make, remote: Path, mood: Mood) -> None:
    checkpoints = make()
    save(checkpoints, 3)
    named: list[str] = []
    mood.before_put = lambda _: named.append((remote / TRACKER).read_text())
    save(checkpoints, 4)
    assert named == ["3"] * 7  # six files, and the tracker itself
    assert mood.written[-1] == str(remote / TRACKER)
    assert (remote / TRACKER).read_text() == "4"


def test_a_run_without_a_url_copies_nothing(make: Make, remote: Path) -> None:
    checkpoints = make(default_hdfs_dir=None)
    save(checkpoints, 3)
    assert not remote.exists()
    assert checkpoints.metrics() == {}


def test_a_busy_store_is_asked_again(
    make: Make, remote: Path, mood: Mood, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = make()
    mood.failures = 3
    save(checkpoints, 3)
    assert content(remote) == content(checkpoints.root)
    assert checkpoints.metrics() == {"checkpoint/failed_uploads": 0}
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_what_failed_is_tried_again_at_the_next_save(
    make: Make, remote: Path, mood: Mood, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = make()
    save(checkpoints, 1)
    mood.is_down = True
    save(checkpoints, 2)
    assert (remote / TRACKER).read_text() == "1"
    assert checkpoints.metrics() == {"checkpoint/failed_uploads": 1}
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told[0] == (
        f"global_step_2 could not be uploaded to moody://{remote}: RuntimeError: 503; "
        "the next save tries again (1 failed so far)"
    )
    assert "not uploaded" in told[1] and "global_step_2" in told[1]
    mood.is_down = False
    save(checkpoints, 3)
    assert names(remote) == ["global_step_1", "global_step_2", "global_step_3", TRACKER]
    assert content(remote) == content(checkpoints.root)
    assert checkpoints.metrics() == {"checkpoint/failed_uploads": 1}


def test_what_a_later_process_finds_is_uploaded(make: Make, remote: Path, mood: Mood) -> None:
    save(make(), 1)
    before = make()
    mood.is_down = True
    save(before, 2)
    mood.is_down = False
    after = make()
    found = after.to_resume()
    assert found == after.root / "global_step_2"
    after.loaded(found)
    after.close()
    assert (remote / TRACKER).read_text() == "2"
    assert content(remote) == content(after.root)


def test_the_rest_of_an_upload_that_was_killed_goes(make: Make, remote: Path) -> None:
    (remote / "global_step_3" / "actor").mkdir(parents=True)
    (remote / "global_step_3" / "actor" / "of_two_ranks.pt").write_text("half")
    checkpoints = make()
    save(checkpoints, 3)
    assert content(remote) == content(checkpoints.root)


def test_copies_are_pruned_like_the_originals(make: Make, remote: Path) -> None:
    checkpoints = make(max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=2)
    save(checkpoints, 8, 9, 10)
    assert names(remote) == ["global_step_10", "global_step_9", TRACKER]
    assert names(remote / "global_step_9") == ["critic", "data.pt", "manifest.json"]
    assert content(remote) == content(checkpoints.root)


def test_what_is_uploaded_is_not_pruned(make: Make, remote: Path, mood: Mood) -> None:
    checkpoints = make(max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=1)
    asked, may_go = threading.Event(), threading.Event()

    def stand_still(path: str) -> None:
        asked.set()
        assert may_go.wait(PATIENCE)

    mood.before_put = stand_still
    checkpoints.save(1, write())
    assert asked.wait(PATIENCE)
    for step in (2, 3):
        checkpoints.save(step, write())
    assert names(checkpoints.root) == ["global_step_1", "global_step_3", TRACKER]
    may_go.set()
    checkpoints.close()
    assert names(checkpoints.root) == ["global_step_3", TRACKER]
    assert names(remote) == ["global_step_3", TRACKER]
    assert content(remote) == content(checkpoints.root)


def test_nobody_waits_for_ever(
    make: Make,
    remote: Path,
    mood: Mood,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = make()
    may_go, has_gone = threading.Event(), threading.Event()

    def stand_still(path: str) -> None:
        assert may_go.wait(PATIENCE)
        has_gone.set()

    mood.before_put = stand_still
    monkeypatch.setattr(remote_checkpoints, "STALL_S", 0.0)
    checkpoints.save(1, write())
    checkpoints.close()
    assert "global_step_1; starting the run again uploads" in caplog.messages[-1]
    assert checkpoints.metrics() == {"checkpoint/failed_uploads": 1}
    may_go.set()
    monkeypatch.setattr(remote_checkpoints, "STALL_S", PATIENCE)
    checkpoints.close()
    assert has_gone.is_set()
    assert not (remote / TRACKER).exists()


# ---------------------------------------------------------------------- resuming


def test_a_run_without_a_folder_goes_on_from_the_copy(make: Make, remote: Path) -> None:
    save(make("first"), 5, 10, text="of the first machine")
    second = make("second")
    found = second.to_resume()
    assert found == second.root / "global_step_10"
    assert content(found) == content(remote / "global_step_10")
    assert names(second.root) == ["global_step_10", TRACKER]
    assert (second.root / TRACKER).read_text() == "10"


def test_the_newer_one_wins(make: Make, remote: Path) -> None:
    save(make("first"), 5, text="of the first machine")
    second = make("second")
    assert second.to_resume() == second.root / "global_step_5"
    save(second, 10, text="of the second machine")
    first = make("first")
    found = first.to_resume()
    assert found == first.root / "global_step_10"
    assert (found / "data.pt").read_text() == "of the second machine"
    save(first, 15)
    shutil.rmtree(remote / "global_step_15")
    (remote / TRACKER).write_text("10")
    assert make("first").to_resume() == first.root / "global_step_15"


def test_a_local_tracker_that_leads_nowhere_is_no_matter(make: Make) -> None:
    checkpoints = make()
    save(checkpoints, 5)
    shutil.rmtree(checkpoints.root / "global_step_5")
    assert make().to_resume() == checkpoints.root / "global_step_5"
    assert (checkpoints.root / "global_step_5" / "data.pt").is_file()


def test_a_tracker_without_its_folder(make: Make, remote: Path) -> None:
    save(make("first"), 5)
    shutil.rmtree(remote / "global_step_5")
    with pytest.raises(ConfigError, match=r"default_hdfs_dir='.*/global_step_5': there is no such"):
        make("second").to_resume()


def test_a_run_that_starts_anew_forgets_the_copies(make: Make, remote: Path) -> None:
    save(make(), 5)
    make(resume_mode="disable")
    assert not (remote / TRACKER).exists()
    assert make().to_resume() is None


def test_a_run_that_goes_back_takes_the_copies_with_it(make: Make, remote: Path) -> None:
    first = make()
    save(first, 5, 10, 15, text="at first")
    again = make(
        resume_mode="resume_path",
        resume_from_path=str(first.root / "global_step_5"),
        max_actor_ckpt_to_keep=1,
        max_critic_ckpt_to_keep=1,
    )
    assert again.to_resume() == first.root / "global_step_5"
    save(again, 10, text="again")
    assert names(remote) == ["global_step_10", TRACKER]
    assert (remote / "global_step_10" / "data.pt").read_text() == "again"
    assert (remote / TRACKER).read_text() == "10"


def test_a_url_to_resume_from(make: Make, remote: Path) -> None:
    save(make("first"), 5, 10)
    url = f"moody://{remote}/global_step_5"
    second = make("second", default_hdfs_dir=None, resume_mode="resume_path", resume_from_path=url)
    found = second.to_resume()
    assert found is not None and found.name == "global_step_5"
    assert content(found) == content(remote / "global_step_5")
    second.loaded(found)
    assert found.exists()
    assert not (second.root / TRACKER).exists()


def test_a_url_that_is_no_checkpoint(make: Make, remote: Path) -> None:
    keys = {"resume_mode": "resume_path", "resume_from_path": f"moody://{remote}/actor"}
    with pytest.raises(CheckpointError, match=r"resume_from_path='.*' is not named global_step_N$"):
        make(**keys).to_resume()


def test_what_was_loaded_is_deleted_where_there_is_a_copy(make: Make, remote: Path) -> None:
    save(make("first"), 5)
    second = make("second", del_local_ckpt_after_load=True)
    found = second.to_resume()
    assert found is not None
    second.loaded(found)
    assert names(second.root) == []
    assert make("second").to_resume() == found
    given = make(
        "third",
        default_hdfs_dir=None,
        del_local_ckpt_after_load=True,
        resume_mode="resume_path",
        resume_from_path=f"moody://{remote}/global_step_5",
    )
    found = given.to_resume()
    assert found is not None
    given.loaded(found)
    assert names(given.root) == []


def test_what_has_no_copy_is_kept(make: Make, mood: Mood) -> None:
    checkpoints = make()
    mood.is_down = True
    save(checkpoints, 5)
    later = make(del_local_ckpt_after_load=True)
    found = later.to_resume()
    assert found == later.root / "global_step_5"
    later.loaded(found)
    assert found.is_dir()


# ---------------------------------------------------------------------- mistakes


def test_a_store_that_is_down_ends_a_run_that_has_nothing_else(
    make: Make, remote: Path, mood: Mood
) -> None:
    mood.is_down = True
    with pytest.raises(ConfigError) as raised:
        make()
    assert str(raised.value) == (
        f"trainer.default_hdfs_dir='moody://{remote}': cannot be written: RuntimeError: 503"
    )


def test_a_store_that_is_down_is_no_matter_where_there_is_a_checkpoint(
    make: Make, mood: Mood, caplog: pytest.LogCaptureFixture
) -> None:
    save(make(), 5)
    mood.is_down = True
    checkpoints = make()
    assert checkpoints.to_resume() == checkpoints.root / "global_step_5"
    checkpoints.close()
    told = [text for text in caplog.messages if "going on from the local checkpoint" in text]
    assert len(told) == 2


@pytest.mark.parametrize("text", ["", "seven", "\u00b2"])
def test_a_torn_tracker_is_written_anew(
    make: Make, remote: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = make()
    save(checkpoints, 5)
    (remote / TRACKER).write_text(text)
    with pytest.raises(ConfigError, match=f"{TRACKER} contains {text!r}, which is no step"):
        make("other").to_resume()
    later = make()
    found = later.to_resume()
    assert found == later.root / "global_step_5"
    later.loaded(found)
    later.close()
    assert (remote / TRACKER).read_text() == "5"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"default_local_dir": "s3://me:secret@bucket/run"},
            "trainer.default_local_dir='s3://***@bucket/run': takes a local folder; "
            "trainer.default_hdfs_dir is the URL that checkpoints are copied to",
        ),
        (
            {"default_local_dir": "/mnt/run", "default_hdfs_dir": "file:///mnt/run/"},
            "trainer.default_hdfs_dir='file:///mnt/run/': is trainer.default_local_dir itself; "
            "takes another folder",
        ),
        (
            {"default_hdfs_dir": "/mnt/run"},
            "trainer.default_hdfs_dir='/mnt/run': takes a URL, such as s3://bucket/run or "
            "file:///run",
        ),
        (
            {"default_hdfs_dir": "https://host/run"},
            "trainer.default_hdfs_dir='https://host/run': can be read, and not be written",
        ),
        (
            {"del_local_ckpt_after_load": True},
            "trainer.del_local_ckpt_after_load=True needs trainer.default_hdfs_dir or a URL as "
            "trainer.resume_from_path: without a copy there the only checkpoint would be deleted",
        ),
    ],
)
def test_places_that_do_not_do(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CheckpointFolder(TrainerConfig(**keys))
    assert str(raised.value) == said


def test_a_damaged_copy_is_not_taken(make: Make, remote: Path) -> None:
    save(make("first"), 5)
    (remote / "global_step_5/actor/model.pt").write_text("wEights")
    second = make("second")
    with pytest.raises(CheckpointError, match=r"actor/model\.pt has another checksum"):
        second.to_resume()
    assert not list(second.root.glob("global_step_*"))
    (remote / "global_step_5/actor/model.pt").write_text("weights")
    assert make("second").to_resume() == second.root / "global_step_5"
