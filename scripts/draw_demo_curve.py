"""Draw the README's picture from a finished demo: `draw_demo_curve.py RUN_FOLDER OUT.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from caldera.storage.writing import write_text_atomic
from caldera.tracking import Series, svg_curve
from caldera.tracking.report import read_metrics


def main(run: Path, out: Path) -> None:
    metrics = read_metrics(run / "metrics.jsonl")
    series = [
        Series(
            "held-out accuracy, greedy", metrics.points("val-core/caldera/arithmetic/acc/mean@1")
        ),
        Series("mean reward of training samples", metrics.points("critic/score/mean")),
    ]
    picture = svg_curve(
        series,
        "make demo: a tiny transformer learns to add, on a CPU",
        "training step",
        "share of right answers",
        width=720,
        height=360,
        y_range=(0.0, 1.0),
        standalone=True,
    )
    write_text_atomic(out, [picture])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
