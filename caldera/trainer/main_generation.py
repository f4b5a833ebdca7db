"""`python3 -m caldera.trainer.main_generation model.path=MODEL data.path=FILE ...`: answer it."""

from __future__ import annotations

import argparse
import pydoc
import sys
from collections.abc import Sequence

from caldera.config import compose_config, help_text
from caldera.config.fields import check_values
from caldera.config.generation_checks import check_generation
from caldera.config.offline import GenerationConfig
from caldera.trainer.entry import run_entry_point, split_overrides

HELP = """\
Sample answers to the prompts in a file: its columns, and `responses` with the
answers to each prompt, are written to a parquet file that `caldera eval` scores.
A run that was ended goes on when the same command is given again.

  caldera generate model.path=MODEL data.path=test.parquet data.output_path=out.parquet
  caldera generate model.path=MODEL data.path=test.parquet data.output_path=out.parquet \\
    data.n_samples=1 rollout.temperature=0
  caldera generate rollout.url=http://host:8000 rollout.top_k=-1 model.path=NAME \\
    data.path=test.parquet data.output_path=out.parquet
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="caldera generate", description=HELP, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        *("-h", "--help"), nargs="?", const="", metavar="KEY",
        help="show this and every key; with KEY, a key or group, that alone",
    )  # fmt: skip
    parser.add_argument("--config-name", default="generation", help="YAML file to start from")
    parser.add_argument("--config-path", help="folder of that file; default: Caldera's own")
    parser.add_argument("key=value", nargs="*", help="values of config keys")
    options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(options)
    if arguments.help is not None:
        keys = help_text(GenerationConfig, arguments.help)
        pydoc.pager(keys if arguments.help else f"{parser.format_help()}\n{keys}")
        return 0

    def work() -> None:
        given = [*overrides, *getattr(arguments, "key=value")]
        name, path = arguments.config_name, arguments.config_path
        config = compose_config(given, name, path, GenerationConfig)
        check_values(config)
        check_generation(config)
        from caldera.trainer.generation.run import generate

        generate(config)

    return run_entry_point(work)


if __name__ == "__main__":
    sys.exit(main())
