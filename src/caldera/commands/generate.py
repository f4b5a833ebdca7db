"""`caldera generate model.path=MODEL data.path=FILE ...`: sample responses to a file of prompts."""

from __future__ import annotations

import sys

from caldera.config.offline import GenerationConfig, check_generation
from caldera.trainer.entry import ConfigCommand


def run_generation(config: GenerationConfig) -> None:
    """Sample as the config says."""
    from caldera.commands.generation import generate  # torch takes seconds to import

    generate(config)


GENERATE = ConfigCommand(
    prog="caldera generate",
    description="""\
Sample responses to the prompts in a file: its columns, and `responses` with those
to each prompt, are written to a parquet file that `caldera eval` scores. A run
that was killed resumes when the same command is given again.

  caldera generate model.path=MODEL data.path=test.parquet data.output_path=out.parquet
  caldera generate model.path=MODEL data.path=test.parquet data.output_path=out.parquet \\
    data.n_samples=1 rollout.temperature=0
  caldera generate rollout.url=http://host:8000 rollout.top_k=-1 model.path=NAME \\
    data.path=test.parquet data.output_path=out.parquet
""",
    config_name="generation",
    schema=GenerationConfig,
    work=run_generation,
    check=check_generation,
)
main = GENERATE.main

if __name__ == "__main__":
    sys.exit(main())
