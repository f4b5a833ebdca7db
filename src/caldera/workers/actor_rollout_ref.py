"""The policy's worker: it samples, computes log-probs, is trained, and knows its reference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from caldera.config import (
    ActorRolloutRefConfig,
    CheckpointConfig,
    FSDPConfig,
    ModelConfig,
    RefConfig,
    RolloutConfig,
)
from caldera.engine import Engine, EngineOptions, OutputName, Outputs
from caldera.errors import ConfigError
from caldera.models.forward import base_module, without_adapter
from caldera.models.loading import DTYPES, Built, build_policy, load_policy
from caldera.protocol import DataProto
from caldera.rollout import Rollout, sampler_class
from caldera.rollout.base import OnFinished
from caldera.rollout.batch import completions_to_batch, requests_from_batch, sampling_params
from caldera.rollout.native.parallel.engine import TensorParallelRollout
from caldera.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.workers.agents import Agents, MakeAgents
from caldera.workers.building import (
    WORKERS,
    TrainedWorker,
    build_engine,
    check_stop_tokens,
    compiles,
    decoder,
    largest_norm,
    megatron_of,
    memory_of,
    register_mesh,
    register_sampling_mesh,
    stop_tokens,
)
from caldera.workers.losses import policy_loss
from caldera.workers.phases import (
    MASKED_RESPONSES,
    POLICY_LOSS,
    PROMPTS,
    REWARD_ROWS,
    log_prob_plan,
    mfu_timer,
    on_device,
    train_epochs,
    update_plan,
)
from caldera.workers.profiling import ProfiledWorker, profiled
from caldera.workers.scoring import MakeScorer, NoScoring, RolloutScoring, Scorer
from caldera.workers.tracing import MakeTracer, NoTracing, RolloutTracing, Tracer
from caldera.workers.weight_sync import WeightSync

logger = logging.getLogger(__name__)

MODEL_KEY = "actor_rollout_ref.model"
ON_ACTOR = make_nd_compute_dataproto_dispatch_fn("actor")
"""Rows go to ranks as the actor's engine lays them out; the reference is laid out alike."""
ON_SAMPLER = make_nd_compute_dataproto_dispatch_fn("rollout")
"""Ranks that sample together get the same rows."""


@WORKERS.register("policy")
class ActorRolloutRefWorker(TrainedWorker, ProfiledWorker):
    """Actor, sampler and, when the role says so, reference, on the same device."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        device: str,
        make_scorer: MakeScorer | None = None,
        make_agents: MakeAgents | None = None,
        make_tracer: MakeTracer | None = None,
    ) -> None:
        """`make_scorer` makes what scores responses as they are sampled, `make_agents` what has
        conversations and tool calls sampled instead of single responses, `make_tracer` what writes
        traces of them."""
        profilers = {part: getattr(config, part).profiler for part in ("actor", "ref", "rollout")}
        super().__init__(profilers)
        self.config = config
        self.device = torch.device(device)
        self._with_reference = "ref" in role
        self._make_scorer = make_scorer
        self._scorer: Scorer | None = None
        self._make_agents = make_agents
        self._agents: Agents | None = None
        self._make_tracer = make_tracer
        self._tracer: Tracer | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights, build the engine, the sampler and the reference."""
        model, actor = self.config.model, self.config.actor
        memory = self._memory()
        options = EngineOptions(
            memory,
            actor.optim,
            largest_norm(actor),
            actor.ulysses_sequence_parallel_size,
            model.enable_gradient_checkpointing,
            model.enable_activation_offload,
            compiles(self.device, actor.use_torch_compile, memory.use_torch_compile),
            actor.checkpoint,
            megatron=megatron_of(actor.strategy, actor.megatron),
        )
        self.actor = build_engine(actor.strategy, self._policy(memory), self.device, options)
        register_mesh(self, "actor", self.actor)
        register_sampling_mesh(self, "rollout", self.config.rollout)
        self._warn_of_length()
        check_stop_tokens(self.actor.module, self.config.rollout, "actor_rollout_ref.rollout")
        self.rollout = self._build_rollout()
        if self.config.rollout.stop:
            self.rollout.decode = decoder(model)
        self.reference = self._build_reference()
        free_cache = self.config.rollout.free_cache_engine
        trainer_dtype = DTYPES[memory.dtype or memory.model_dtype]
        self.weight_sync = WeightSync(self.actor, self.rollout, free_cache, trainer_dtype)
        self.actor.offload()

    def close(self) -> None:
        if hasattr(self, "rollout"):  # not before `init_model`
            self.rollout.close()

    @register(dispatch_mode=ON_SAMPLER, needs=PROMPTS)
    @profiled("rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response a row; the row's `sample_seed` decides its random numbers.

        Of ranks that sample together the first answers.
        """
        if self.rollout.leads:
            with self.rollout.leading():
                return self._sample(prompts)
        with self.weight_sync:
            self.rollout.follow()
        return DataProto()

    def _sample(self, prompts: DataProto) -> DataProto:
        config, meta = self.config.rollout, prompts.meta_info
        seeds = [int(seed) for seed in prompts.non_tensor_batch["sample_seed"]]
        stops = stop_tokens(self.actor.module, meta["eos_token_id"])
        if self._make_agents is not None:
            return self._run_agents(prompts, seeds, stops)
        requests = requests_from_batch(prompts, config, stops, seeds)
        with self._begin_scoring(prompts) as scoring, self.weight_sync:
            tracing = self._begin_tracing(prompts, scoring.on_finished)
            completions = self.rollout.generate(requests, tracing.on_finished)
        responses = scoring.join(
            completions_to_batch(
                prompts,
                completions,
                config.response_length,
                meta["pad_token_id"],
                config.calculate_log_probs,
            )
        )
        tracing.write(responses)
        return responses

    @register(dispatch_mode=ON_ACTOR, needs=MASKED_RESPONSES)
    @profiled("actor")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Adds old_log_probs and entropys, and where the config asks for it sum_pi_squared."""
        keys: dict[OutputName, str] = {"log_probs": "old_log_probs", "entropy": "entropys"}
        if self.config.actor.calculate_sum_pi_squared:
            keys["sum_pi_squared"] = "sum_pi_squared"
        outputs, mfu = self._infer(self.actor, data, self.config.rollout, *keys)
        tensors = {key: outputs[name] for name, key in keys.items()}
        return DataProto.from_dict(tensors, meta_info={"metrics": mfu})

    @register(dispatch_mode=ON_ACTOR, needs=MASKED_RESPONSES)
    @profiled("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Adds ref_log_prob, and full_kl, that of the actor as it is now, if meta_info asks so."""
        assert self.reference is not None, "this worker's role has no reference"
        with without_adapter(self.reference.module):
            outputs, _ = self._infer(self.reference, data, self.config.ref, "log_probs")
        tensors = {"ref_log_prob": outputs["log_probs"]}
        if data.meta_info.get("full_kl"):
            outputs, _ = self._infer(self.actor, data, self.config.ref, "full_kl")
            tensors["full_kl"] = outputs["full_kl"]
        return DataProto.from_dict(tensors)

    @register(dispatch_mode=ON_ACTOR, needs=(*MASKED_RESPONSES, *POLICY_LOSS), in_mini_batches=True)
    @profiled("actor")
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on the batch; returns metrics alone."""
        actor = self.config.actor
        mini_batch_size = actor.ppo_mini_batch_size * self.config.rollout.n  # samples
        all_rows = len(data) * self.actor.dp_size
        on_policy = all_rows == mini_batch_size and actor.ppo_epochs == 1
        plan = update_plan(self.config, self.reference)
        with on_device(self.actor, plan.reference, optimizer=True):
            metrics = train_epochs(
                self.actor,
                data,
                policy_loss(actor, on_policy),
                plan,
                mini_batch_size,
                actor.ppo_epochs,
                actor.data_loader_seed if actor.shuffle else None,
                "actor",
            )
        if actor.use_kl_loss:
            metrics["actor/kl_coef"] = actor.kl_loss_coef
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @profiled("rollout")
    def update_weights(self) -> None:
        """Give the sampler the actor's newest weights now, not when it is next asked to sample."""
        self.weight_sync.update_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_traces(self) -> None:
        """Wait for traces that are still to be written; there are no more to come."""
        if self._tracer is not None:
            self._tracer.finish()

    def _trained(self) -> tuple[Engine, CheckpointConfig, ModelConfig]:
        return self.actor, self.config.actor.checkpoint, self.config.model

    def _run_agents(self, prompts: DataProto, seeds: list[int], stops: set[int]) -> DataProto:
        """Sample a trajectory a row, of as many turns as its agent loop takes."""
        if self._agents is None:
            assert self._make_agents is not None
            self._agents = self._make_agents()
        rows = list(prompts.non_tensor_batch[REWARD_ROWS])
        params = sampling_params(prompts.meta_info, self.config.rollout, stops)
        pad = prompts.meta_info["pad_token_id"]
        with self._begin_scoring(prompts) as scoring, self.weight_sync:
            tracing = self._begin_tracing(prompts, scoring.on_finished)
            responses = self._agents(rows, seeds, self.rollout, params, pad, tracing.on_finished)
        responses = scoring.join(responses)
        tracing.write(responses)
        return responses

    def _begin_scoring(self, prompts: DataProto) -> RolloutScoring:
        """What is told of each response as it ends: the scorer, if the controller sends it rows."""
        if self._make_scorer is None or REWARD_ROWS not in prompts.non_tensor_batch:
            return NoScoring()
        if self._scorer is None:
            self._scorer = self._make_scorer()
        return self._scorer(prompts)

    def _begin_tracing(self, prompts: DataProto, on_finished: OnFinished | None) -> RolloutTracing:
        if self._make_tracer is None:
            return NoTracing(on_finished)
        if self._tracer is None:
            self._tracer = self._make_tracer(self.rank)
        return self._tracer.begin(prompts, on_finished)

    def _warn_of_length(self) -> None:
        most = getattr(base_module(self.actor.module).config, "max_position_embeddings", None)
        asked = self.config.rollout.prompt_length + self.config.rollout.response_length
        if most is not None and asked > most:
            logger.warning(
                "data.max_prompt_length + data.max_response_length = %d tokens, but the model was "
                "made for %d (max_position_embeddings)",
                asked,
                most,
            )

    def _build_rollout(self) -> Rollout:
        """A sampler on the actor's own module, or on a copy where the precision differs, or on a
        part of one that several ranks share, or an engine with a model of its own."""
        config, memory = self.config.rollout, self._memory()
        module = self.actor.module
        sampler = sampler_class(config.sampler)
        if sampler.traits.owns_weights:
            return sampler(config, module, self.device)
        dtype = DTYPES[config.dtype or memory.model_dtype]
        # adapters come over merged
        plain = replace(self.config.model, lora_rank=0, lora_adapter_path=None)
        if config.tensor_model_parallel_size > 1:
            empty = build_policy(plain, dtype, memory.seed, MODEL_KEY, empty=True).module
            timeout_s = self.config.nccl_timeout
            return TensorParallelRollout.join(config, empty, self.device, timeout_s)
        if not self.actor.is_whole or dtype != DTYPES[memory.model_dtype]:
            if config.native.exact:
                raise ConfigError(
                    "actor_rollout_ref.rollout.native.exact=True: sampler and trainer must share "
                    "one module, but the actor is sharded, or actor_rollout_ref.rollout.dtype="
                    f"{config.dtype} is not that of its parameters. Takes strategy=local, and the "
                    "same precision"
                )
            module = load_policy(plain, dtype, memory.seed, MODEL_KEY).to(self.device)
        return sampler(config, module, self.device)

    def _build_reference(self) -> Engine | None:
        """With an adapter it is the actor itself, to be run without it."""
        if not self._with_reference:
            return None
        if self.config.model.has_adapter:
            return self.actor
        ref = self.config.ref
        memory = memory_of(ref.strategy, ref.fsdp_config, ref.megatron, self.device)
        options = EngineOptions(
            memory,
            sequence_parallel=ref.ulysses_sequence_parallel_size,
            compiles=compiles(self.device, ref.use_torch_compile, memory.use_torch_compile),
            megatron=megatron_of(ref.strategy, ref.megatron),
        )
        engine = build_engine(ref.strategy, self._policy(memory), self.device, options)
        own = (engine.sequence_parallel_size, engine.model_parallel_size)
        actors = (self.actor.sequence_parallel_size, self.actor.model_parallel_size)
        if own != actors:
            raise ConfigError(
                f"actor_rollout_ref.ref.strategy={ref.strategy}: the reference shares tokens over "
                f"{own[0]} of {own[1]} ranks with the same rows, the actor "
                f"over {actors[0]} of {actors[1]}: both must do alike"
            )
        engine.offload()
        return engine

    def _memory(self) -> FSDPConfig:
        actor = self.config.actor
        return memory_of(actor.strategy, actor.fsdp_config, actor.megatron, self.device)

    def _policy(self, memory: FSDPConfig) -> Callable[[bool], Built]:
        dtype = DTYPES[memory.model_dtype]
        return partial(build_policy, self.config.model, dtype, memory.seed, MODEL_KEY)

    def _infer(
        self,
        engine: Engine,
        data: DataProto,
        config: RolloutConfig | RefConfig,
        *outputs: OutputName,
    ) -> tuple[Outputs, dict[str, float]]:
        plan = log_prob_plan(config, outputs, self.config.rollout.temperature, self.reference)
        with (
            on_device(engine, plan.reference),
            mfu_timer("actor_infer", engine, data) as mfu,
        ):
            return engine.infer(data, plan), mfu
