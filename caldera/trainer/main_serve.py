"""`caldera serve model.path=MODEL ...`: a model behind OpenAI's protocol."""

from __future__ import annotations

import argparse
import pydoc
import sys
from collections.abc import Sequence

from caldera.config import compose_config, help_text
from caldera.config.fields import check_values
from caldera.config.serve import ServeConfig, check_serve
from caldera.trainer.entry import run_entry_point, split_overrides

HELP = """\
Serve a model behind OpenAI's protocol: /v1/chat/completions, /v1/completions
and /v1/models, with streaming, tools, log-probs and token ids. Requests with a
session id are recorded, token by token. SIGTERM or Ctrl-C ends it, once
requests in flight have their answers.

  caldera serve model.path=MODEL
  caldera serve model.path=MODEL server.host=0.0.0.0 server.port=8000
  caldera serve model.path=MODEL rollout.enable_prefix_caching=True
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="caldera serve", description=HELP, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        *("-h", "--help"), nargs="?", const="", metavar="KEY",
        help="show this and every key; with KEY, a key or group, that alone",
    )  # fmt: skip
    parser.add_argument("--config-name", default="serve", help="YAML file to start from")
    parser.add_argument("--config-path", help="folder of that file; default: Caldera's own")
    parser.add_argument("key=value", nargs="*", help="values of config keys")
    options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(options)
    if arguments.help is not None:
        keys = help_text(ServeConfig, arguments.help)
        pydoc.pager(keys if arguments.help else f"{parser.format_help()}\n{keys}")
        return 0

    def work() -> None:
        given = [*overrides, *getattr(arguments, "key=value")]
        name, path = arguments.config_name, arguments.config_path
        config = compose_config(given, name, path, ServeConfig)
        check_values(config)
        check_serve(config)
        from caldera.trainer.serving import serve

        serve(config)

    return run_entry_point(work)


if __name__ == "__main__":
    sys.exit(main())
