"""`caldera`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from caldera.trainer.entry import run_entry_point, split_overrides


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:  # its own parser knows --config-name and the keys
        from caldera.trainer.main_ppo import main as train

        return train(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="caldera", description="Reinforcement learning of language models."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("train", help="train by reinforcement learning: key=value ...")
    _add_demo(commands)
    _add_report(commands)
    options, overrides = split_overrides(arguments)
    parsed = parser.parse_args(options)
    if parsed.command == "report":
        return _report(parsed)
    return _demo(parsed, [*overrides, *getattr(parsed, "key=value")])


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="watch a model learn on this machine")
    demo.add_argument(
        "--model", choices=["tiny", "smollm2"], default="tiny", help="which model learns (tiny)"
    )
    demo.add_argument("--lora", action="store_true", help="train an adapter, not all weights")
    demo.add_argument("--output", type=Path, help="folder to write to (outputs/demo-MODEL)")
    demo.add_argument("key=value", nargs="*", help="values of config keys")


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="make one page of a run's folder")
    report.add_argument("run", type=Path, help="the run's trainer.default_local_dir")
    report.add_argument("--output", type=Path, help="file to write (RUN/report.html)")


def _demo(parsed: argparse.Namespace, overrides: list[str]) -> int:
    from caldera.demo.run import run_demo

    output = parsed.output or Path("outputs") / f"demo-{parsed.model}"
    return run_entry_point(lambda: run_demo(parsed.model, output, parsed.lora, overrides))


def _report(parsed: argparse.Namespace) -> int:
    from caldera.tracking import write_report

    out = parsed.output or parsed.run / "report.html"
    return run_entry_point(lambda: write_report(parsed.run, out, f"Run {parsed.run.name}"))


if __name__ == "__main__":
    sys.exit(main())
