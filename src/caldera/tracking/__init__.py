"""Metrics, progress, dumps and the report of a run."""

from __future__ import annotations

from caldera.tracking.curves import Series, svg_curve
from caldera.tracking.dumps import dump_generations, select_val_generations, write_jsonl_atomic
from caldera.tracking.loggers import LOGGERS, Generation, LoggedRun, Logger
from caldera.tracking.progress import TrainingProgress, progress_iter
from caldera.tracking.report import write_report
from caldera.tracking.tracking import Tracking, check_loggers

__all__ = [
    "LOGGERS",
    "Generation",
    "LoggedRun",
    "Logger",
    "Series",
    "Tracking",
    "TrainingProgress",
    "check_loggers",
    "dump_generations",
    "progress_iter",
    "select_val_generations",
    "svg_curve",
    "write_jsonl_atomic",
    "write_report",
]
