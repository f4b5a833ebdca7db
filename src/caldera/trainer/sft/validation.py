"""The loss on rows that are not trained on."""

from __future__ import annotations

from typing import cast

import torch

from caldera.config import SFTTrainerConfig
from caldera.core_algos import LossScale
from caldera.data import FixedLoader
from caldera.engine import Outputs
from caldera.protocol import DataProto, tensors_of
from caldera.workers import SupervisedWorker
from caldera.workers.objective import Objective


class LossValidator:
    """Every number is the one of the whole validation set, however it is cut into batches."""

    def __init__(self, config: SFTTrainerConfig, objective: Objective, loader: FixedLoader) -> None:
        self._loss_fn = objective.loss(config)
        self._outputs = objective.outputs
        self._loader = loader
        self._scale = _count(loader)

    @torch.no_grad()
    def run(self, group: SupervisedWorker) -> dict[str, float]:
        """val/loss, and what else the objective tells."""
        totals: dict[str, float] = {}
        for rows in self._loader:
            batch = DataProto.from_single_dict(rows)
            found = tensors_of(group.evaluate(batch))
            outputs = cast(Outputs, {name: found[name] for name in self._outputs})
            added = {k: v for k, v in found.items() if k not in self._outputs}
            for name, value in added.items():
                tensors_of(batch)[name] = value
            _, metrics = self._loss_fn(outputs, batch, self._scale)
            for name, share in metrics.items():
                totals[f"val/{name}"] = totals.get(f"val/{name}", 0.0) + share.item()
        return totals


def _count(loader: FixedLoader) -> LossScale:
    """The counts of all rows, which are thereby all read once before the run begins."""
    tokens = sequences = 0
    for rows in loader:
        mask = rows["response_mask"]
        assert isinstance(mask, torch.Tensor)
        counted = LossScale.from_mask(mask)
        tokens += int(counted.batch_num_tokens or 0)
        sequences += int(counted.global_batch_size or 0)
    return LossScale(tokens, sequences)
