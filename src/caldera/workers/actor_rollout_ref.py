"""Policy and sampler on the same device, joined by `WeightSync`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from caldera.config import ActorRolloutRefConfig
from caldera.models.loading import DTYPES, build_policy, load_policy
from caldera.rollout import Rollout, TrainedPolicy, sampler_class
from caldera.single_controller import Dispatch, register
from caldera.workers.building import WORKERS, decoder
from caldera.workers.hooks import MakeHook
from caldera.workers.policy import MODEL_KEY, PolicyWorker
from caldera.workers.sampler import MakeAgents, SamplerWorker
from caldera.workers.weight_sync import WeightSync


@WORKERS.register("policy")
class ActorRolloutRefWorker(PolicyWorker, SamplerWorker):
    """Actor, sampler and, when the role says so, reference."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        device: str,
        hooks: Sequence[MakeHook] = (),
        make_agents: MakeAgents | None = None,
    ) -> None:
        super().__init__(config, role, device)
        self.set_hooks(hooks, make_agents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights, build the engine, the sampler and the reference."""
        self.build_actor()
        self.prepare_sampling(self.actor.module)
        self.rollout = self._build_rollout()
        self.reference = self.build_reference()
        free_cache = self.config.rollout.free_cache_engine
        memory = self.memory()
        trainer_dtype = DTYPES[memory.dtype or memory.model_dtype]
        self.weight_sync = WeightSync(self.actor, self.rollout, free_cache, trainer_dtype)
        self.actor.offload()

    def _build_rollout(self) -> Rollout:
        """The sampler that `rollout.name` chooses, on the actor's module or on a model of its own,
        as its class decides."""
        config, memory = self.config.rollout, self.memory()
        # adapters come over merged
        plain = replace(self.config.model, lora_rank=0, lora_adapter_path=None)
        policy = TrainedPolicy(
            module=self.actor.module,
            is_whole=self.actor.is_whole,
            dtype=DTYPES[memory.model_dtype],
            load=lambda dtype: load_policy(plain, dtype, memory.seed, MODEL_KEY),
            shape=lambda dtype: (
                build_policy(plain, dtype, memory.seed, MODEL_KEY, empty=True).module
            ),
            timeout_s=self.config.nccl_timeout,
        )
        rollout = sampler_class(config.sampler).beside(policy, config, self.device)
        if config.stop:
            rollout.decode = decoder(self.config.model)
        return rollout
