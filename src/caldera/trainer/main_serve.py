"""`caldera serve model.path=MODEL ...`: a model behind OpenAI's protocol."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from caldera.config import compose_config
from caldera.config.fields import check_values
from caldera.config.serve import ServeConfig, check_serve
from caldera.trainer.entry import ConfigCommand

SERVE = ConfigCommand(
    prog="caldera serve",
    description="""\
Serve a model behind OpenAI's protocol: /v1/chat/completions, /v1/completions
and /v1/models, with streaming, tools, log-probs and token ids. Requests with a
session id are recorded, token by token. SIGTERM or Ctrl-C ends it, once
requests in flight have their answers.

  caldera serve model.path=MODEL
  caldera serve model.path=MODEL server.host=0.0.0.0 server.port=8000
  caldera serve model.path=MODEL rollout.enable_prefix_caching=True
""",
    config_name="serve",
    schema=ServeConfig,
)


def load_serving(
    overrides: Sequence[str], config_name: str, config_path: str | None
) -> ServeConfig:
    """The config of a server, with every value checked."""
    config = compose_config(overrides, config_name, config_path, ServeConfig)
    check_values(config)
    check_serve(config)
    return config


def run_server(config: ServeConfig) -> None:
    """Serve until told to stop."""
    from caldera.trainer.serving import serve

    serve(config)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return SERVE.run(SERVE.read(argv), load_serving, run_server)


if __name__ == "__main__":
    sys.exit(main())
