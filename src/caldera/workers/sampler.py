"""The sampler's worker: it samples the responses of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from caldera.config import ActorRolloutRefConfig
from caldera.protocol import DataProto
from caldera.rollout import Rollout, SamplingParams
from caldera.rollout.base import OnFinished
from caldera.rollout.batch import completions_to_batch, requests_from_batch, sampling_params
from caldera.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.workers.building import (
    check_stop_tokens,
    register_sampling_mesh,
    stop_tokens,
    warn_of_length,
)
from caldera.workers.hooks import MakeHook, ResponseHooks
from caldera.workers.phases import PROMPTS, REWARD_ROWS
from caldera.workers.profiling import ProfiledWorker, profiled
from caldera.workers.weight_sync import WeightSync

KEY = "actor_rollout_ref.rollout"
LENGTHS = "data.max_prompt_length + data.max_response_length"
ON_SAMPLER = make_nd_compute_dataproto_dispatch_fn("rollout")
"""Ranks that sample together get the same rows."""


Agents = Callable[
    [
        Sequence[Mapping[str, Any]],
        Sequence[int],
        Rollout,
        SamplingParams,
        int,
        OnFinished | None,
    ],
    DataProto,
]
"""(rows, seeds, sampler, sampling parameters, padding token, what is called as soon as a trajectory
ends) -> a trajectory for each row, as a batch"""
MakeAgents = Callable[[], Agents]
"""Called in the sampler's process, to which it is sent."""


class SamplerWorker(ProfiledWorker):
    """Samples a response a row, or a trajectory where agent loops run.

    Where its weights come from, and when it may use the device's memory, is up to `weight_sync`.
    """

    config: ActorRolloutRefConfig
    rollout: Rollout
    weight_sync: WeightSync

    def set_hooks(self, hooks: Sequence[MakeHook], make_agents: MakeAgents | None) -> None:
        """`hooks`: see `workers.hooks`; `make_agents` makes what has trajectories of several turns
        sampled instead of single responses."""
        self._hooks = ResponseHooks(hooks)
        self._make_agents = make_agents
        self._agents: Agents | None = None

    def prepare_sampling(self, policy: nn.Module) -> None:
        """Before the sampler is built: what is asked of it fits the policy's model."""
        config = self.config.rollout
        self._policy = policy
        register_sampling_mesh(self, "rollout", config)
        warn_of_length(policy, config, LENGTHS)
        check_stop_tokens(policy, config, KEY)

    def close(self) -> None:
        if hasattr(self, "rollout"):  # not before `init_model`
            self.rollout.close()

    @register(dispatch_mode=ON_SAMPLER, needs=PROMPTS)
    @profiled("rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response a row; the row's `sample_seed` decides its random numbers.

        Of ranks that sample together the first responds.
        """
        if self.rollout.leads:
            with self.rollout.leading():
                return self._sample(prompts)
        with self.weight_sync:
            self.rollout.follow()
        return DataProto()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @profiled("rollout")
    def update_weights(self) -> None:
        """Take the policy's newest weights now, not at the next call of `generate_sequences`."""
        self.weight_sync.update_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_hooks(self) -> None:
        """Wait for what hooks still write, such as traces; no more responses will come."""
        self._hooks.finish()

    def _sample(self, prompts: DataProto) -> DataProto:
        hooks = self._hooks.begin(prompts, self.rank)
        with hooks, self.weight_sync:
            if self._make_agents is None:
                responses = self._responses(prompts, hooks.on_finished)
            else:
                responses = self._trajectories(prompts, hooks.on_finished)
        return hooks.join(responses)

    def _responses(self, prompts: DataProto, on_finished: OnFinished | None) -> DataProto:
        config = self.config.rollout
        requests = requests_from_batch(prompts, config, self._stops(prompts), _seeds(prompts))
        return completions_to_batch(
            prompts,
            self.rollout.generate(requests, on_finished),
            config.response_length,
            prompts.meta_info["pad_token_id"],
            config.calculate_log_probs,
        )

    def _trajectories(self, prompts: DataProto, on_finished: OnFinished | None) -> DataProto:
        """A trajectory a row, of as many turns as its agent loop takes."""
        if self._agents is None:
            assert self._make_agents is not None
            self._agents = self._make_agents()
        rows = list(prompts.non_tensor_batch[REWARD_ROWS])
        params = sampling_params(prompts.meta_info, self.config.rollout, self._stops(prompts))
        pad = prompts.meta_info["pad_token_id"]
        return self._agents(rows, _seeds(prompts), self.rollout, params, pad, on_finished)

    def _stops(self, prompts: DataProto) -> set[int]:
        return stop_tokens(self._policy, prompts.meta_info["eos_token_id"])


def _seeds(prompts: DataProto) -> list[int]:
    return [int(seed) for seed in prompts.non_tensor_batch["sample_seed"]]
