"""`caldera`: the command line."""

from __future__ import annotations

import argparse
import math
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
    if arguments[:1] == ["data"]:  # the same: what it takes is known where data sets are
        return _data(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="caldera", description="Reinforcement learning of language models."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("train", help="train by reinforcement learning: key=value ...")
    commands.add_parser("data", help="prepare public data sets, check data files")
    _add_demo(commands)
    _add_report(commands)
    _add_sandbox(commands)
    options, overrides = split_overrides(arguments)
    parsed = parser.parse_args(options)
    if parsed.command == "report":
        return _report(parsed)
    if parsed.command == "sandbox":
        return _sandbox(parsed)
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


def _add_sandbox(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sandbox = commands.add_parser("sandbox", help="run programs that a model wrote, for others")
    actions = sandbox.add_subparsers(dest="action", required=True, metavar="action")
    serve = actions.add_parser("serve", help="answer Sandbox Fusion's requests: POST /run_code")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, default=8080, help="port to listen on (8080)")
    serve.add_argument("--slots", type=int, default=2, help="programs at the same time (2)")
    serve.add_argument("--seconds", type=float, default=30, help="most that a request gets (30)")
    serve.add_argument("--memory-mb", type=int, default=1024, help="most of a program (1024)")
    serve.add_argument(
        "--allow-unsafe", action="store_true", help="run even where nothing can be isolated"
    )


def _demo(parsed: argparse.Namespace, overrides: list[str]) -> int:
    from caldera.demo.run import run_demo

    output = parsed.output or Path("outputs") / f"demo-{parsed.model}"
    return run_entry_point(lambda: run_demo(parsed.model, output, parsed.lora, overrides))


def _data(arguments: list[str]) -> int:
    from caldera.data.prepare.command import DataCommand
    from caldera.reward_score.routing import find_scorer

    command = DataCommand(arguments, find_scorer)
    return run_entry_point(command.run) or command.status


def _report(parsed: argparse.Namespace) -> int:
    from caldera.tracking import write_report

    out = parsed.output or parsed.run / "report.html"
    return run_entry_point(lambda: write_report(parsed.run, out, f"Run {parsed.run.name}"))


def _sandbox(parsed: argparse.Namespace) -> int:
    def start() -> None:
        from caldera.reward.sandbox import Limits
        from caldera.reward.sandbox.server import serve

        cpu_seconds = math.ceil(parsed.seconds)
        limits = Limits(parsed.seconds, cpu_seconds, parsed.memory_mb)
        serve(parsed.host, parsed.port, parsed.slots, limits, parsed.allow_unsafe)

    return run_entry_point(start)


if __name__ == "__main__":
    sys.exit(main())
