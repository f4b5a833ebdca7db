"""From a loader's rows to what the sampler needs: repetitions, uids and seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from caldera.agent_loop.output import COLUMN
from caldera.data import Batch, object_array
from caldera.errors import ConfigError
from caldera.protocol import DataProto
from caldera.reward import ROWS
from caldera.seeds import derive_seed

SINGLE_TURN = "single_turn_agent"
SAMPLER_TENSORS = ["input_ids", "attention_mask", "position_ids"]


def stamp_rows(
    rows: Batch,
    repeats: int,
    root_seed: int,
    place: tuple[int | str, ...],
    meta: dict[str, Any],
    sends_rows: bool = False,
) -> tuple[DataProto, DataProto]:
    """(what the sampler needs, what stays with the driver), each row `repeats` times.

    The n-th repetition of a row gets a seed of its own, and all share the row's uid. Both are
    functions of the root seed, the place in the run and the row's position in the batch. Where the
    sampler's process scores, or runs agent loops, it also gets the columns of each row.
    """
    batch = DataProto.from_single_dict(dict(rows))
    prefix = "-".join(str(part) for part in place)
    batch.non_tensor_batch["uid"] = object_array([f"{prefix}-{i}" for i in range(len(batch))])
    count = len(batch)
    batch = batch.repeat(repeats, interleave=True)
    batch.non_tensor_batch["sample_seed"] = np.array(
        [derive_seed(root_seed, *place, i, k) for i in range(count) for k in range(repeats)],
        dtype=object,
    )
    ids = [key for key in ("raw_prompt_ids",) if key in batch.non_tensor_batch]
    prompts = batch.pop(SAMPLER_TENSORS, ["sample_seed", *ids])
    prompts.meta_info.update(meta)
    if sends_rows:
        columns = batch.non_tensor_batch
        prompts.non_tensor_batch[ROWS] = object_array(
            [{key: column[row] for key, column in columns.items()} for row in range(len(batch))]
        )
    return prompts, batch


def check_loops(rows: DataProto, responses: DataProto) -> DataProto:
    """The responses, unless they are single turns and rows ask for agent loops, as those of a data
    set may that cannot tell of its columns before the run."""
    if COLUMN in responses.non_tensor_batch:
        return responses
    asked = {str(name) for name in rows.non_tensor_batch.get("agent_name", ()) if name}
    if others := sorted(asked - {SINGLE_TURN}):
        raise ConfigError(
            f"rows ask for the agent loops {', '.join(others)}, but no loop runs: the data set has "
            "no column_values(name), which would report them. Define it, or set "
            "actor_rollout_ref.rollout.multi_turn.enable=True"
        )
    return responses
