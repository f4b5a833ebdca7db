"""Write docs/reference/config.md, the page of every config key, from the dataclasses.

python scripts/write_reference.py           write the page
python scripts/write_reference.py --check   fail if it is not up to date
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
    later_table,
    moved_table,
    reference_tables,
    short_table,
)
from caldera.config.serve import ServeConfig
from caldera.config.sft import SFTTrainerConfig

PAGE = Path(__file__).parents[1] / "docs/reference/config.md"


def page() -> str:
    """The whole page."""
    infos = describe(PPOTrainerConfig)
    refused = sum(info.refused for info in infos)
    return f"""# Every config key

<!-- Written by scripts/write_reference.py from the dataclasses in src/caldera/config. -->

`caldera train` knows {len(known_keys())} keys: {len(infos) - refused} are honoured, {refused} are
understood and refused, each with a reason. [Configuration](../configuration.md) shows how to set
them. "follows" names the key whose value is the default; a leading dot is a key of the same group.

## The short profile

The {len(SHORT_PROFILE)} keys that most runs set. `caldera train --cfg short` prints them as YAML.

{short_table(PPOTrainerConfig)}
## ppo_trainer and ppo_megatron_trainer

{reference_tables(PPOTrainerConfig)}
## Keys of other releases

These move to their place here, with one warning a run:

{moved_table()}
These exist only in later releases of verl. Their defaults there are accepted and change nothing;
any other value is refused:

{later_table()}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is not up to date: run python scripts/write_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
