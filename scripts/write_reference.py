"""Write docs/reference/*.md, every config key and the refused ones, from the dataclasses.

python scripts/write_reference.py           write the pages
python scripts/write_reference.py --check   fail if one is not up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from caldera.config import SHORT_PROFILE, PPOTrainerConfig
from caldera.config.loader import known_keys
from caldera.config.migrate import MOVED_SUPERVISED
from caldera.config.offline import EvaluationConfig, GenerationConfig
from caldera.config.preference import DPOTrainerConfig, RewardModelTrainerConfig
from caldera.config.reference import (
    describe,
    moved_table,
    reference_tables,
    refused_table,
    short_table,
)
from caldera.config.serve import ServeConfig
from caldera.config.sft import SFTTrainerConfig

FOLDER = Path(__file__).parents[1] / "docs/reference"
COMMANDS: dict[str, type] = {
    "train": PPOTrainerConfig,
    "sft": SFTTrainerConfig,
    "rm": RewardModelTrainerConfig,
    "dpo": DPOTrainerConfig,
    "generate": GenerationConfig,
    "eval": EvaluationConfig,
    "serve": ServeConfig,
}


def page() -> str:
    """The whole page."""
    infos = describe(PPOTrainerConfig)
    refused = sum(info.refused for info in infos)
    return f"""# Every config key

<!-- Written by scripts/write_reference.py from the dataclasses in src/caldera/config. -->

`caldera train` knows {len(known_keys())} keys: {len(infos) - refused} are honoured, {refused} are
understood and [refused](refused_keys.md), each with a reason. [Configuration](../configuration.md)
shows how to set them. "follows" names the key whose value is the default; a leading dot is a key of
the same group.

## The short profile

The {len(SHORT_PROFILE)} keys that most runs set. `caldera train --cfg short` prints them as YAML.

{short_table(PPOTrainerConfig)}
## ppo_trainer and ppo_megatron_trainer

{reference_tables(PPOTrainerConfig)}
## Keys of other releases

These move to their place here, with one warning a run:

{moved_table()}

Keys that only later releases have are [refused](refused_keys.md).

## sft_trainer and sft_trainer_engine

The keys of [supervised fine-tuning](../sft.md). `sft_trainer_engine` differs in two defaults:
`data.multiturn.enable` and `data.use_dynamic_bsz` are true. Names of other releases move to their
place here:

{moved_table(MOVED_SUPERVISED)}
{reference_tables(SFTTrainerConfig)}
## rm_trainer

`caldera rm` ([preferences](../preferences.md)) knows the keys of `sft_trainer`, with these
differences:

{reference_tables(RewardModelTrainerConfig, SFTTrainerConfig)}
## dpo_trainer

The same for `caldera dpo`:

{reference_tables(DPOTrainerConfig, SFTTrainerConfig)}
{_without_training()}"""


def _without_training() -> str:
    """The commands that use a model as it is."""
    return f"""## generation

The keys of [`caldera generate`](../generation.md).

{reference_tables(GenerationConfig)}
## evaluation

The keys of [`caldera eval`](../evaluation.md).

{reference_tables(EvaluationConfig)}
## serve

The keys of [`caldera serve`](../serving.md).

{reference_tables(ServeConfig)}"""


def refused_page() -> str:
    """The refused keys."""
    return f"""# Refused keys

<!-- Written by scripts/write_reference.py from the dataclasses in src/caldera/config. -->

Keys of verl that Caldera knows and cannot honour, by reason. Each takes its default, the first
value of the third column, and the values after it; any other value is an error with the reason.
"follows" names the key whose value is the default.

{refused_table(COMMANDS)}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    is_check, stale = parser.parse_args().check, 0
    for name, text in {"config.md": page(), "refused_keys.md": refused_page()}.items():
        path = FOLDER / name
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is not up to date: run python scripts/write_reference.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
