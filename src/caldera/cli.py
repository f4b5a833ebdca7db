"""`caldera`: the command line."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from caldera import __version__
from caldera.commands.completion import SHELLS, completion_script, words_of
from caldera.config import PPOTrainerConfig
from caldera.errors import nearest
from caldera.installation import version_line
from caldera.trainer.entry import (
    USER_ERROR,
    ConfigCommand,
    OptionsCommand,
    leave_if_stopped,
    stopped,
    text_parser,
)


class Command(NamedTuple):
    """What `caldera NAME` does."""

    help: str
    target: str
    """`module:NAME` in this package, imported when it is asked for: a ConfigCommand, or an
    OptionsCommand."""


COMMANDS = {
    "train": Command("train by reinforcement learning: key=value ...", "trainer.main_ppo:TRAIN"),
    "sft": Command(
        "fine-tune on responses or conversations: key=value ...", "trainer.sft_trainer:SFT"
    ),
    "rm": Command(
        "train a reward model on pairs of responses: key=value ...",
        "trainer.rm_trainer:REWARD_MODEL",
    ),
    "dpo": Command(
        "train a policy on pairs of responses: key=value ...", "trainer.dpo_trainer:DPO"
    ),
    "generate": Command(
        "sample responses to the prompts of a file: key=value ...", "commands.generate:GENERATE"
    ),
    "eval": Command("score a file of responses: key=value ...", "commands.eval:EVALUATE"),
    "serve": Command(
        "serve a model behind OpenAI's protocol: key=value ...", "commands.serve:SERVE"
    ),
    "plan": Command("what a training run would do and need: key=value ...", "commands.plan:PLAN"),
    "doctor": Command(
        "what of this machine works, and how to mend the rest", "commands.doctor:DOCTOR"
    ),
    "data": Command("prepare public data sets, check data files", "cli:DATA"),
    "retriever": Command("index passages, and serve them to agents that search", "cli:RETRIEVER"),
    "demo": Command("watch a model learn on this machine", "cli:DEMO"),
    "report": Command("make one page of a run's folder", "cli:REPORT"),
    "merge": Command("make a Hugging Face folder of a checkpoint", "commands.merge:MERGE"),
    "sandbox": Command("run programs that a model wrote, for others", "cli:SANDBOX"),
    "repeat": Command(
        "what has changed since a run, and the command that repeats it", "commands.repeat:REPEAT"
    ),
    "migrate": Command(
        "read a launch script of verl's: what changes, and a short equivalent",
        "commands.migrate:MIGRATE",
    ),
    "completion": Command(
        "print a script that completes commands, options and keys in a shell", "cli:COMPLETION"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        status = _status_of(arguments[0], arguments[1:])
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


def _status_of(name: str, arguments: list[str]) -> int:
    try:
        status = _command(name).main(arguments)
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


def _command(name: str) -> ConfigCommand[Any] | OptionsCommand:
    module, _, constant = COMMANDS[name].target.partition(":")
    found: ConfigCommand[Any] | OptionsCommand = getattr(
        importlib.import_module(f"caldera.{module}"), constant
    )
    return found


# ---------------------------------------------------------------------- commands of few lines


def data_parser() -> argparse.ArgumentParser:
    from caldera.data.prepare.command import parser

    return parser()


def data(options: argparse.Namespace) -> int:
    from caldera.data.prepare.command import run
    from caldera.reward_score.routing import find_scorer

    return run(options, find_scorer)


def retriever_parser() -> argparse.ArgumentParser:
    from caldera.search_agent.retriever.command import parser

    return parser()


def retriever(options: argparse.Namespace) -> None:
    from caldera.search_agent.retriever.command import run

    run(options)


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


def demo(options: argparse.Namespace) -> None:
    from caldera.demo.run import run_demo

    output = options.output or Path("outputs") / f"demo-{options.model}"
    run_demo(options.model, output, options.lora, options.overrides)


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


def report(options: argparse.Namespace) -> None:
    from caldera.tracking import write_report
    from caldera.tracking.progress import print_line

    out = options.output or options.run / "report.html"
    write_report(options.run, out, f"Run {options.run.name}")
    print_line(f"Report: {out}")


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


def sandbox(options: argparse.Namespace) -> None:
    from caldera.sandbox import Limits
    from caldera.sandbox.server import serve

    limits = Limits(options.seconds, math.ceil(options.seconds), options.memory_mb)
    serve(options.host, options.port, options.slots, limits, options.allow_unsafe)


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


def completion(options: argparse.Namespace) -> None:
    words = {}
    for name, (told, _) in COMMANDS.items():
        command = _command(name)
        words[name] = words_of(told, command.parser(), command.schema)
    sys.stdout.write(completion_script(options.shell, words))


DATA = OptionsCommand(data_parser, data)
RETRIEVER = OptionsCommand(retriever_parser, retriever)
DEMO = OptionsCommand(demo_parser, demo, PPOTrainerConfig)
REPORT = OptionsCommand(report_parser, report)
SANDBOX = OptionsCommand(sandbox_parser, sandbox)
COMPLETION = OptionsCommand(completion_parser, completion)

if __name__ == "__main__":
    sys.exit(main())
