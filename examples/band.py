"""What several seeds of a recipe reached, as a table and as a curve.

    python3 examples/band.py runs/gsm8k_smollm2/grpo-seed* --svg curve.svg --title "GSM8K, GRPO"

Of each validation: the metric of every run, their mean, and the spread between the runs. Where a
run has dumped its validation responses (trainer.validation_data_dir=RUN/validation), a last column
has the standard error that comes from the number of test questions: sqrt(p (1 - p) / questions).
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from caldera.storage.writing import write_text_atomic
from caldera.tracking import Series, svg_curve
from caldera.tracking.report import read_metrics, validation_keys


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs, one a seed")
    parser.add_argument("--metric", help="name of the metric (the run's main validation metric)")
    parser.add_argument("--svg", type=Path, help="file for the curve")
    parser.add_argument("--title", default="Accuracy on held-out questions")
    options = parser.parse_args()

    runs = {run.name: read_metrics(run / "metrics.jsonl") for run in options.runs}
    metric = options.metric or next(
        key for run in runs.values() for key in validation_keys(run).values()
    )
    curves = {name: dict(run.points(metric)) for name, run in runs.items()}
    steps = sorted(set.intersection(*map(set, curves.values())))

    print(f"{metric}\n")
    print(f"| step | {' | '.join(runs)} | mean | std between runs | standard error of one run |")
    print("| -- " * (len(runs) + 4) + "|")
    for step in steps:
        values = [curve[step] for curve in curves.values()]
        spread = f"{statistics.stdev(values):.2%}" if len(values) > 1 else ""
        cells = [f"{value:.1%}" for value in [*values, statistics.mean(values)]]
        questions = count_lines(options.runs[0] / "validation" / f"{step:.0f}.jsonl")
        print(f"| {step:.0f} | {' | '.join(cells)} | {spread} | {error(values, questions)} |")
    if options.svg:
        series = [Series(name, sorted(curve.items())) for name, curve in curves.items()]
        drawing = svg_curve(
            series, options.title, "training step", metric.rpartition("/")[0], 720, 360,
            standalone=True,
        )  # fmt: skip
        write_text_atomic(options.svg, [drawing])


def error(values: list[float], questions: int) -> str:
    mean = statistics.mean(values)
    if not questions or not 0 <= mean <= 1:
        return ""
    return f"{math.sqrt(mean * (1 - mean) / questions):.2%}"


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    main()
