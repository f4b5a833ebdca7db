"""Training on one batch: epochs, mini-batches, one schedule step."""

from __future__ import annotations

from caldera.engine import Engine, ForwardPlan, LossFn
from caldera.protocol import DataProto


def train_epochs(
    engine: Engine,
    data: DataProto,
    loss_fn: LossFn,
    plan: ForwardPlan,
    mini_batch_size: int,
    epochs: int,
    shuffle_seed: int | None,
    name: str,
) -> dict[str, float]:
    """One optimiser step per mini-batch; metrics are means over the steps."""
    steps = [
        engine.train(mini_batch, loss_fn, plan)
        for mini_batch in data.make_iterator(
            mini_batch_size,
            epochs,
            seed=shuffle_seed,
            dataloader_kwargs={"shuffle": shuffle_seed is not None},
        )
    ]
    metrics = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
    metrics[f"{name}/grad_norm"] = metrics.pop("grad_norm")
    metrics[f"{name}/lr"] = engine.step_schedule()
    return metrics
