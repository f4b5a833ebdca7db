"""`caldera`: the command line."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caldera import __version__
from caldera.commands.completion import SHELLS, CommandWords, completion_script, words_of
from caldera.errors import nearest
from caldera.installation import version_line
from caldera.trainer.entry import (
    USER_ERROR,
    leave_if_stopped,
    run_entry_point,
    split_overrides,
    stopped,
    text_parser,
)


@dataclass(frozen=True)
class Command:
    """What `caldera NAME` does: all of it is imported when it is asked for, as `module:name`."""

    help: str
    main: str
    """Takes the arguments, returns the exit status."""
    parser: str
    """Makes the parser that reads them."""
    schema: str | None = None
    """The config whose keys it takes."""


def of_module(help: str, module: str) -> Command:
    """A command that is a module."""
    return Command(help, f"{module}:main", f"{module}:parser")


def of_keys(help: str, command: str) -> Command:
    """A command that takes `key=value ...`."""
    return Command(
        f"{help}: key=value ...", f"{command}.main", f"{command}.parser", f"{command}.schema"
    )


COMMANDS = {
    "train": of_keys("train by reinforcement learning", "caldera.trainer.main_ppo:TRAIN"),
    "sft": of_keys("fine-tune on responses or conversations", "caldera.trainer.sft_trainer:SFT"),
    "rm": of_keys(
        "train a reward model on pairs of responses", "caldera.trainer.rm_trainer:REWARD_MODEL"
    ),
    "dpo": of_keys("train a policy on pairs of responses", "caldera.trainer.dpo_trainer:DPO"),
    "generate": of_keys(
        "sample responses to the prompts of a file", "caldera.commands.generate:GENERATE"
    ),
    "eval": of_keys("score a file of responses", "caldera.commands.eval:EVALUATE"),
    "serve": of_keys("serve a model behind OpenAI's protocol", "caldera.commands.serve:SERVE"),
    "plan": Command(
        "what a training run would do and need: key=value ...",
        "caldera.commands.plan:main",
        "caldera.commands.plan:parser",
        "caldera.config:PPOTrainerConfig",
    ),
    "doctor": of_module(
        "what of this machine works, and how to mend the rest", "caldera.commands.doctor"
    ),
    "data": Command(
        "prepare public data sets, check data files",
        "caldera.cli:data",
        "caldera.data.prepare.command:parser",
    ),
    "retriever": Command(
        "index passages, and serve them to agents that search",
        "caldera.cli:retriever",
        "caldera.search_agent.retriever.command:parser",
    ),
    "demo": Command(
        "watch a model learn on this machine", "caldera.cli:demo", "caldera.cli:demo_parser"
    ),
    "report": Command(
        "make one page of a run's folder", "caldera.cli:report", "caldera.cli:report_parser"
    ),
    "merge": of_module("make a Hugging Face folder of a checkpoint", "caldera.commands.merge"),
    "sandbox": Command(
        "run programs that a model wrote, for others",
        "caldera.cli:sandbox",
        "caldera.cli:sandbox_parser",
    ),
    "repeat": of_module(
        "what has changed since a run, and the command that repeats it", "caldera.commands.repeat"
    ),
    "migrate": of_module(
        "read a launch script of verl's: what changes, and a short equivalent",
        "caldera.commands.migrate",
    ),
    "completion": Command(
        "print a script that completes commands, options and keys in a shell",
        "caldera.cli:completion",
        "caldera.cli:completion_parser",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        status = _status_of(COMMANDS[arguments[0]], arguments[1:])
        return leave_if_stopped(status) if argv is None else status
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return USER_ERROR
    if not arguments[0].startswith("-"):
        likely = nearest(arguments[0], COMMANDS)
        guess = f"did you mean {likely}? " if likely else ""
        parser.error(f"no command {arguments[0]!r}; {guess}`caldera --help` lists them")
    parser.parse_args(arguments)  # shows the help or the version, or complains
    return 0


def _status_of(command: Command, arguments: list[str]) -> int:
    try:
        status: int = _named(command.main)(arguments)
    except KeyboardInterrupt as stop:  # before it had begun: imports take a moment
        return stopped(stop)
    return status


HELP = """\
Reinforcement learning of language models.

  caldera doctor     what of this machine works
  caldera demo       watch a small model learn, in about two minutes
  caldera train ...  train your own
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="caldera",
        description=HELP,
        epilog="`caldera COMMAND --help` describes each command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"caldera {version_line(__version__)}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help)
    return parser


def _named(target: str) -> Any:
    module, _, names = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


# ---------------------------------------------------------------------- commands of few lines


def data(arguments: list[str]) -> int:
    from caldera.data.prepare.command import parser, run
    from caldera.reward_score.routing import find_scorer

    options = parser().parse_args(arguments)
    return run_entry_point(lambda: run(options, find_scorer))


def retriever(arguments: list[str]) -> int:
    from caldera.search_agent.retriever.command import parser, run

    options = parser().parse_args(arguments)
    return run_entry_point(lambda: run(options))


DEMO_HELP = """\
Train a small model on this machine and watch it learn: a tiny transformer that
learns to add, in about two minutes on a CPU, or SmolLM2-135M, which learns to
multiply.

  caldera demo
  caldera demo --model smollm2 --lora
  caldera demo trainer.total_training_steps=20
"""


def demo_parser() -> argparse.ArgumentParser:
    parser = text_parser("caldera demo", DEMO_HELP)
    parser.add_argument(
        "--model", choices=["tiny", "smollm2"], default="tiny", help="which model learns (tiny)"
    )
    parser.add_argument("--lora", action="store_true", help="train an adapter, not all weights")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder to write to (outputs/demo-MODEL)"
    )
    parser.add_argument("key=value", nargs="*", help="values of config keys")
    return parser


def demo(arguments: list[str]) -> int:
    from caldera.demo.run import run_demo

    options, overrides = split_overrides(arguments)
    parsed = demo_parser().parse_args(options)
    overrides += getattr(parsed, "key=value")
    output = parsed.output or Path("outputs") / f"demo-{parsed.model}"
    return run_entry_point(lambda: run_demo(parsed.model, output, parsed.lora, overrides))


def report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="caldera report",
        description="Make one page of a run's folder: curves, responses before and after, times.",
    )
    parser.add_argument("run", type=Path, help="the run's trainer.default_local_dir")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (RUN/report.html)"
    )
    return parser


def report(arguments: list[str]) -> int:
    from caldera.tracking import write_report
    from caldera.tracking.progress import print_line

    parsed = report_parser().parse_args(arguments)
    out = parsed.output or parsed.run / "report.html"

    def write() -> None:
        write_report(parsed.run, out, f"Run {parsed.run.name}")
        print_line(f"Report: {out}")

    return run_entry_point(write)


def sandbox_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="caldera sandbox",
        description="Run programs that a model wrote, apart from everything else, for others.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    serve = actions.add_parser(
        "serve",
        help="answer Sandbox Fusion's requests: POST /run_code",
        description="Answer Sandbox Fusion's requests (POST /run_code), and say whether tests pass "
        "(POST /check), until Ctrl-C or SIGTERM.",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, default=8080, help="port to listen on (8080)")
    serve.add_argument(
        "--slots", type=int, default=2, help="programs that run at the same time (2)"
    )
    serve.add_argument(
        "--seconds", type=float, default=30, help="longest that a program may run (30)"
    )
    serve.add_argument(
        "--memory-mb", type=int, default=1024, help="memory that a program may take (1024)"
    )
    serve.add_argument(
        "--allow-unsafe", action="store_true", help="run even where nothing can be isolated"
    )
    return parser


def sandbox(arguments: list[str]) -> int:
    parsed = sandbox_parser().parse_args(arguments)

    def start() -> None:
        from caldera.sandbox import Limits
        from caldera.sandbox.server import serve

        limits = Limits(parsed.seconds, math.ceil(parsed.seconds), parsed.memory_mb)
        serve(parsed.host, parsed.port, parsed.slots, limits, parsed.allow_unsafe)

    return run_entry_point(start)


COMPLETION_HELP = """\
Print a script that completes commands, options, config keys and their choices.

  source <(caldera completion bash)        in ~/.bashrc
  source <(caldera completion zsh)         in ~/.zshrc, after compinit
  caldera completion fish | source         in ~/.config/fish/config.fish
"""


def completion_parser() -> argparse.ArgumentParser:
    parser = text_parser("caldera completion", COMPLETION_HELP)
    parser.add_argument("shell", choices=SHELLS, help="which shell it is for")
    return parser


def completion(arguments: list[str]) -> int:
    parsed = completion_parser().parse_args(arguments)
    sys.stdout.write(completion_script(parsed.shell, _command_words()))
    return 0


def _command_words() -> dict[str, CommandWords]:
    """What can follow each command."""
    return {
        name: words_of(
            command.help,
            _named(command.parser)(),
            None if command.schema is None else _named(command.schema),
        )
        for name, command in COMMANDS.items()
    }


if __name__ == "__main__":
    sys.exit(main())
