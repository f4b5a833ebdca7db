"""TensorBoard's event files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from caldera.tracking.loggers import GENERATION_COLUMNS, GENERATIONS, LOGGERS, Generation, LoggedRun


@LOGGERS.register("tensorboard")
class TensorboardLogger:
    """Files in TENSORBOARD_DIR, or else in tensorboard_log/PROJECT/EXPERIMENT."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        given = os.environ.get("TENSORBOARD_DIR")
        folder = Path(given or Path("tensorboard_log", run.project_name, run.experiment_name))
        folder.mkdir(parents=True, exist_ok=True)
        # Steps that a resumed run logs again are hidden in what an earlier process wrote.
        purge = run.resume_step + 1 if run.resume_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        if run.config is not None:
            text = json.dumps(run.config, indent=2, default=str)
            self._writer.add_text("config", f"```\n{text}\n```", run.resume_step)

    def log(self, data: dict[str, float], step: int) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [GENERATION_COLUMNS, ("---",) * len(GENERATION_COLUMNS)]
        cells = [[str(step), *map(str, sample)] for sample in samples]
        rows += [tuple(_cell(text) for text in row) for row in cells]
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        self._writer.add_text(GENERATIONS, table, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _cell(text: str) -> str:
    """Text that stays in its cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "<br>")
