"""A training run as a Python object: made by `grpo`, `ppo`, `sft` or `dpo`, and trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from caldera.api.datasets import write_rows
from caldera.data.importing import write_objects
from caldera.errors import CheckpointError
from caldera.storage.writing import write_text_atomic
from caldera.tracking import write_report
from caldera.tracking.progress import LogHandler
from caldera.tracking.report import inline_curves, read_metrics
from caldera.trainer.checkpoint import step_folder, tracked_step
from caldera.trainer.running import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METRICS = "metrics.jsonl"
OBJECTS = "objects.pkl"


@dataclass
class RunFiles:
    """What a run has in memory, and writes to its folder as it begins."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By the name of the file."""
    objects: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        for name, rows in self.rows.items():
            write_rows(rows, folder / name, name)
        for name, text in self.texts.items():
            write_text_atomic(folder / name, [text])
        if self.objects:
            write_objects(folder / OBJECTS, self.objects)


C = TypeVar("C", bound=RunConfig)


class Run(Generic[C]):
    """A training run. `train` it; then `report`, `metrics`, `model` and `generate` show what it
    has learnt. Everything is in `folder`, from which a run that was stopped goes on."""

    def __init__(
        self,
        config: C,
        train: Callable[[C], None],
        files: RunFiles,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.folder = Path(config.trainer.default_local_dir).expanduser()
        self._train = train
        self._files = files
        self._call = dict(call or {})

    def train(self) -> Self:
        """Train to the last step, from the newest checkpoint in the folder; returns the run."""
        show_log()
        self._files.write(self.folder)
        self._train(self.config)
        return self

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each step so far, `step` among them."""
        rows = read_metrics(self.folder / METRICS).rows
        return [{"step": step, **row} for step, row in rows.items()]

    def report(self, file: str | Path | None = None) -> Path:
        """Write the page of the run, with curves, responses and times; returns its path."""
        out = self.folder / "report.html" if file is None else Path(file)
        write_report(self.folder, out, f"Run {self.folder.name}")
        return out

    @property
    def model_path(self) -> Path:
        """The Hugging Face folder of the newest checkpoint."""
        step = tracked_step(self.folder)
        if step is None:
            raise CheckpointError(f"{self.folder} has no checkpoint yet: train() the run first")
        return self.folder / step_folder(step) / "actor" / "huggingface"

    @property
    def model(self) -> PreTrainedModel:
        """The trained model, on the CPU, as transformers loads it."""
        from caldera.api.inference import load_model

        return load_model(self.model_path)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from caldera.data import hf_tokenizer

        return hf_tokenizer(str(self.model_path))

    def generate(self, prompts: Sequence[Any], **keys: Any) -> list[Any]:
        """Responses of the trained model: see `caldera.generate`."""
        from caldera.api.inference import generate

        lengths = {
            name: self._call[name]
            for name in ("max_prompt_length", "max_response_length")
            if name in self._call
        }
        return generate(self.model_path, prompts, **(lengths | keys))

    def evaluate(self, dataset: Any, **keys: Any) -> dict[str, float]:
        """Score the trained model on other data, with the rewards, tools and keys of the run: see
        `caldera.evaluate`."""
        from caldera.api.inference import evaluate

        return evaluate(**(self._call | {"model": self.model_path, "dataset": dataset} | keys))

    def __repr__(self) -> str:
        step = tracked_step(self.folder)
        state = "not trained yet" if step is None else f"checkpoint of step {step}"
        return f"<caldera.Run {str(self.folder)!r}: {state}>"

    def _repr_html_(self) -> str:
        """The curves so far, for notebooks."""
        if not (self.folder / METRICS).is_file():
            return f"<p>{self.folder}: not trained yet</p>"
        return inline_curves(read_metrics(self.folder / METRICS))


def show_log() -> None:
    """Log messages of Caldera's as the commands show them, where nothing shows them yet."""
    ours = logging.getLogger("caldera")
    if not ours.hasHandlers():
        ours.addHandler(LogHandler())
        ours.setLevel(logging.INFO)
