"""The worker of generation: a model that samples and is never trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from caldera.config import ModelConfig, RolloutConfig
from caldera.data import object_array
from caldera.errors import ConfigError
from caldera.models.loading import DTYPES, load_policy, shape_of_policy
from caldera.protocol import DataProto
from caldera.rollout import ROLLOUTS, Completion, Request, Rollout, sampler_class
from caldera.rollout.batch import requests_from_batch
from caldera.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.workers.building import (
    check_stop_tokens,
    decoder,
    register_sampling_mesh,
    stop_tokens,
    warn_of_length,
)

MODEL_KEY = "model"
ON_SAMPLER = make_nd_compute_dataproto_dispatch_fn("rollout")
PROMPT_IDS, SEEDS, RESPONSE_IDS = "raw_prompt_ids", "sample_seeds", "response_ids"


class GenerationWorker(Worker):
    """Each rank has the whole model, or shares an engine that has. A row is a prompt with the seeds
    of its n samples."""

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, eos_token_id: int | None, device: str
    ) -> None:
        super().__init__()
        self.model = model
        self.config = rollout
        self.eos_token_id = eos_token_id
        self.device = torch.device(device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights, in the precision of sampling, and build the sampler."""
        config = self.config
        module = load_sampled(self.model, config.sampler, str(config.dtype), config.seed)
        register_sampling_mesh(self, "rollout", config)
        check_stop_tokens(module, config, "rollout")
        self.rollout = build_sampler(config, module, self.device)
        if config.stop:
            self.rollout.decode = decoder(self.model)
        self._stop_tokens = stop_tokens(module, self.eos_token_id)
        if self.rank == 0:
            warn_of_length(module, config, "rollout.prompt_length + rollout.response_length")

    def close(self) -> None:
        if hasattr(self, "rollout"):  # not before `init_model`
            self.rollout.close()

    @register(dispatch_mode=ON_SAMPLER, needs=(PROMPT_IDS, SEEDS))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample as many responses a row as it has seeds; returns their tokens, without padding.

        Of ranks that share an engine the first answers.
        """
        if not self.rollout.leads:
            return DataProto()
        counts = [len(seeds) for seeds in prompts.non_tensor_batch[SEEDS]]
        seeds = [int(seed) for row in prompts.non_tensor_batch[SEEDS] for seed in row]
        samples = prompts.sample_level_repeat(counts)
        requests = requests_from_batch(samples, self.config, self._stop_tokens, seeds)
        completions = iter(self._sample(requests, counts))
        responses = [[next(completions).token_ids for _ in range(count)] for count in counts]
        return DataProto(non_tensor_batch={RESPONSE_IDS: object_array(responses)})

    def _sample(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Completion]:
        if not self.rollout.traits.draws_together:
            return self.rollout.generate(requests)
        # Responses would depend on what else is in the batch, so each prompt is a separate batch.
        groups = _groups(requests, counts)
        return [completion for group in groups for completion in self.rollout.generate(group)]


def untrained_sampler(name: str) -> type[Rollout]:
    """The sampler of that name, outside training."""
    if name not in ROLLOUTS and not set(name) & set(".:"):
        raise ConfigError(f"rollout.name={name!r}: takes one of {', '.join(ROLLOUTS.names())}")
    return sampler_class(name, "rollout.name")


def load_sampled(model: ModelConfig, sampler: str, dtype: str, seed: int) -> nn.Module:
    """What the sampler of that name samples from. A server elsewhere has weights of its own: of the
    model here, which may be far too large for this machine, the shape is enough."""
    if not untrained_sampler(sampler).traits.takes_weights:
        return shape_of_policy(model, MODEL_KEY)
    return load_policy(model, DTYPES[dtype], seed, MODEL_KEY)


def build_sampler(config: RolloutConfig, module: nn.Module, device: torch.device) -> Rollout:
    """A sampler of the weights that the module has; an engine takes them when it first samples."""
    sampler = untrained_sampler(config.sampler)
    return sampler(config, module.to(device) if sampler.traits.takes_weights else module, device)


def _groups(requests: Sequence[Request], counts: Sequence[int]) -> Iterator[Sequence[Request]]:
    start = 0
    for count in counts:
        yield requests[start : start + count]
        start += count
