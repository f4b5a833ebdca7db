"""`caldera`: the command line."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from caldera.errors import ConfigError, UnsupportedError
from caldera.trainer.entry import run_entry_point, split_overrides


def _train(arguments: list[str]) -> int:
    from caldera.trainer.main_ppo import main as train

    return train(arguments)


def _sft(arguments: list[str]) -> int:
    from caldera.trainer.sft_trainer import SFT

    return SFT.main(arguments)


def _reward_model(arguments: list[str]) -> int:
    from caldera.trainer.rm_trainer import REWARD_MODEL

    return REWARD_MODEL.main(arguments)


def _dpo(arguments: list[str]) -> int:
    from caldera.trainer.dpo_trainer import DPO

    return DPO.main(arguments)


def _generate(arguments: list[str]) -> int:
    from caldera.trainer.main_generation import main as generate

    return generate(arguments)


def _evaluate(arguments: list[str]) -> int:
    from caldera.trainer.main_eval import main as evaluate

    return evaluate(arguments)


def _serve(arguments: list[str]) -> int:
    from caldera.trainer.main_serve import main as serve

    return serve(arguments)


def _data(arguments: list[str]) -> int:
    from caldera.data.prepare.command import DataCommand
    from caldera.reward_score.routing import find_scorer

    command = DataCommand(arguments, find_scorer)
    return run_entry_point(command.run) or command.status


OWN_PARSERS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "sft": _sft,
    "rm": _reward_model,
    "dpo": _dpo,
    "generate": _generate,
    "eval": _evaluate,
    "serve": _serve,
    "data": _data,
}
"""Commands that read their arguments themselves, such as --config-name and keys."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in OWN_PARSERS:
        return OWN_PARSERS[arguments[0]](arguments[1:])
    parser = argparse.ArgumentParser(
        prog="caldera", description="Reinforcement learning of language models."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("train", help="train by reinforcement learning: key=value ...")
    commands.add_parser("sft", help="fine-tune on answers or conversations: key=value ...")
    commands.add_parser("rm", help="train a reward model on pairs of answers: key=value ...")
    commands.add_parser("dpo", help="train a policy on pairs of answers: key=value ...")
    commands.add_parser("data", help="prepare public data sets, check data files")
    commands.add_parser("generate", help="sample answers to the prompts of a file: key=value ...")
    commands.add_parser("eval", help="score a file of answers: key=value ...")
    commands.add_parser("serve", help="serve a model behind OpenAI's protocol: key=value ...")
    _add_demo(commands)
    _add_report(commands)
    _add_merge(commands)
    _add_sandbox(commands)
    # Other commands than this one know no keys, but files whose names may have an equals sign.
    is_demo = arguments[:1] == ["demo"]
    options, overrides = split_overrides(arguments) if is_demo else (arguments, [])
    parsed = parser.parse_args(options)
    if parsed.command == "report":
        return _report(parsed)
    if parsed.command == "merge":
        return _merge(parsed)
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


MERGE_HELP = """\
Make a Hugging Face folder out of a checkpoint, whichever strategy and number of
ranks wrote it, and check it: transformers loads the folder, and its logits must
be those of the checkpoint's shards, to the last bit. The folder appears only if
they are.

  caldera merge --local-dir RUN/global_step_20/actor --target-dir MODEL
  caldera merge --local-dir RUN/global_step_20/actor --target-dir MODEL --adapter merge
  caldera merge test --local-dir RUN/global_step_20/actor --test-hf-dir MODEL
"""


def _add_merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    merge = commands.add_parser(
        "merge",
        help="make a Hugging Face folder of a checkpoint",
        description=MERGE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.add_argument(
        "operation", nargs="?", choices=["merge", "test"], default="merge",
        help="test: compare all tensors with a folder that exists (merge)",
    )  # fmt: skip
    _add_folders(merge)
    merge.add_argument(
        "--adapter", choices=["keep", "merge"], default="keep",
        help="a LoRA adapter stays one, or becomes part of the weights (keep)",
    )  # fmt: skip
    merge.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"],
        help="precision of the weights that are written (that of the checkpoint)",
    )  # fmt: skip
    for name, text in (
        ("is-value-model", "a critic; told from the checkpoint's names otherwise"),
        ("tie-word-embedding", "the language head is the embedding, whatever the config says"),
        ("trust-remote-code", "run code that comes with the model"),
    ):
        merge.add_argument(*_spellings(name), action="store_true", help=text)
    merge.add_argument(
        "--backend", default="fsdp", help="fsdp or megatron: their files are the same"
    )
    for name in ("private", "use-cpu-initialization"):  # verl's, which mean nothing here
        merge.add_argument(*_spellings(name), action="store_true", help=argparse.SUPPRESS)
    merge.add_argument(*_spellings("hf-upload-path"), help=argparse.SUPPRESS)


def _add_folders(merge: argparse.ArgumentParser) -> None:
    merge.add_argument(
        *_spellings("local-dir"), type=Path, required=True, metavar="DIR",
        help="the checkpoint: global_step_N/actor, .../critic, or global_step_N for its actor",
    )  # fmt: skip
    merge.add_argument(
        *_spellings("target-dir"), type=Path, metavar="OUT", help="folder to write, which is new"
    )
    merge.add_argument(
        *_spellings("test-hf-dir"),
        type=Path,
        metavar="DIR",
        help="with test: the folder to compare",
    )


def _spellings(name: str) -> list[str]:
    """An option with dashes and, as verl has some, with underscores."""
    return sorted({f"--{name}", f"--{name.replace('-', '_')}"})


def _merge(parsed: argparse.Namespace) -> int:
    def work() -> None:
        _check_merge(parsed)
        from caldera.trainer.merge import MergeOptions, compare, merge
        from caldera.trainer.merge_source import Reading

        reading = Reading(
            parsed.is_value_model, parsed.tie_word_embedding, parsed.trust_remote_code
        )
        options = MergeOptions(parsed.local_dir, parsed.adapter, parsed.dtype, reading)
        if parsed.operation == "test":
            compare(options, parsed.test_hf_dir)
        else:
            merge(options, parsed.target_dir)

    return run_entry_point(work)


def _check_merge(parsed: argparse.Namespace) -> None:
    if parsed.backend not in ("fsdp", "megatron"):
        raise UnsupportedError(f"--backend={parsed.backend}: takes fsdp, megatron")
    if parsed.hf_upload_path is not None:
        raise UnsupportedError(
            f"--hf-upload-path={parsed.hf_upload_path}: nothing is uploaded; "
            "`hf upload` does that with the folder"
        )
    if parsed.operation == "merge" and parsed.target_dir is None:
        raise ConfigError("caldera merge needs --target-dir: a folder to write, which is new")
    if parsed.operation == "test" and parsed.test_hf_dir is None:
        raise ConfigError("caldera merge test needs --test-hf-dir: the folder to compare")


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
