"""Checkpoints pushed to a repository of the Hugging Face Hub, while the run goes on."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

STAGED = ".pushing"
"""Where a run's folder holds what is being pushed: links, which outlast the checkpoint."""
MOST_S = 1800.0
"""How long the end of a run waits for the last push."""
HUGGING_FACE, ADAPTER = "huggingface", "lora_adapter"
OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt")


def pushed_folder(role: Path) -> Path:
    """The folder of a checkpoint's role that is pushed: the whole model, or its adapter alone."""
    whole = role / HUGGING_FACE
    is_whole = any(whole.glob("*.safetensors"))
    return whole if is_whole or not (role / ADAPTER).is_dir() else role / ADAPTER


class HubPushes:
    """Pushes the newest checkpoint in a thread. No failure ends the run or holds up its steps."""

    def __init__(self, repository: str, root: Path) -> None:
        """`repository` is `name` or `owner/name`; `root` is the run's folder."""
        self.failed = 0
        """Pushes that failed so far."""
        self._repository = repository
        self._staging = root / STAGED
        self._changed = threading.Condition()  # guards what follows
        self._next: tuple[int, Path, Path] | None = None
        """A step, what is to be pushed of it, and where that stands in the checkpoint."""
        self._is_asked = False
        """Whether the repository is to be made."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Make the repository where there is none, so that a missing token is told at once."""
        shutil.rmtree(self._staging, ignore_errors=True)  # of a killed run
        with self._changed:
            self._is_asked = True
            self._start()

    def add(self, step: int, folder: Path) -> None:
        """Push the actor of a checkpoint, in place of one that still waits."""
        source = pushed_folder(folder / "actor")
        staged = self._staging / folder.name
        if error := _attempt(lambda: _stage(source, staged)):
            self._failed(step, source, error)
            return
        with self._changed:
            if self._next is not None:
                shutil.rmtree(self._next[1], ignore_errors=True)
            self._next = step, staged, source
            self._start()

    def wait(self, seconds: float = MOST_S) -> None:
        """Wait for what is being pushed."""
        end = time.monotonic() + seconds
        with self._changed:
            if self._thread is not None:
                logger.info("waiting for the push to %s", self._repository)
            while self._thread is not None and time.monotonic() < end:
                self._changed.wait(timeout=1.0)
            if self._thread is not None:
                logger.warning("the push to %s takes too long, and is left", self._repository)

    # ---- the thread

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hub-push", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (job := self._take()) is not None:
            job()

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            if self._is_asked:
                self._is_asked = False
                return self._make_repository
            if self._next is not None:
                (step, staged, source), self._next = self._next, None
                return lambda: self._push(step, staged, source)
            self._thread = None
            self._changed.notify_all()
            return None

    def _make_repository(self) -> None:
        error = _attempt(lambda: self._repository_url())
        if error is not None:
            logger.warning(
                "trainer.push_to_hub=%r: the repository cannot be written: %s; the run goes on, "
                "and tries again at each checkpoint. `hf auth login` or HF_TOKEN gives a token",
                self._repository,
                error,
            )

    def _push(self, step: int, staged: Path, source: Path) -> None:
        error = _attempt(lambda: self._upload(step, staged))
        shutil.rmtree(staged, ignore_errors=True)
        if error is not None:
            self._failed(step, source, error)

    def _failed(self, step: int, source: Path, error: str) -> None:
        self.failed += 1
        logger.warning(
            "step %d could not be pushed to %s: %s; the run goes on. By hand: "
            "hf upload %s %s --private",
            step,
            self._repository,
            error,
            self._repository,
            source,
        )

    def _upload(self, step: int, staged: Path) -> None:
        url, repository = self._repository_url()
        _api().upload_folder(repo_id=repository, folder_path=staged, commit_message=f"Step {step}")
        logger.info("pushed step %d to %s", step, url)

    def _repository_url(self) -> tuple[str, str]:
        """Of the repository, which is made, and private, where there is none; and its full name."""
        url = _api().create_repo(self._repository, private=True, exist_ok=True)
        return str(url), url.repo_id


def _api() -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _attempt(work: Callable[[], object]) -> str | None:
    """Do it; what went wrong, in a line, if anything did."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 -- of the hub, its library or the network
        first = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {first}"
    return None


def _stage(source: Path, staged: Path) -> None:
    """Links to the files of a folder; an adapter gets those of its tokenizer, too."""
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(source, staged, copy_function=_link)
    if source.name == ADAPTER:
        for pattern in OF_TOKENIZERS:
            for file in source.with_name(HUGGING_FACE).glob(pattern):
                _link(file, staged / file.name)


def _link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
