"""Which of Caldera's names stands behind each of verl's.

A target is `module:name`. The name `*` stands for all public names of a module.
"""

from __future__ import annotations

ALL_OF = "*"

ENTRY_POINTS = {
    "verl.trainer.main_ppo": "caldera.trainer.main_ppo:main",
    "verl.trainer.main_ppo_v0": "caldera.trainer.main_ppo:main",
    "verl.trainer.main_generation": "caldera.commands.generate:main",
    "verl.trainer.main_generation_server": "caldera.commands.generation_server:main",
    "verl.trainer.main_eval": "caldera.commands.eval:main",
    "verl.trainer.fsdp_sft_trainer": "caldera.trainer.fsdp_sft_trainer:CLASSIC.main",
    "verl.trainer.sft_trainer": "caldera.trainer.sft_trainer:CONVERSATIONS.main",
    "verl.trainer.sft_trainer_ray": "caldera.trainer.sft_trainer_ray:ON_RAY.main",
    "verl.model_merger": "caldera.commands.merge:main",
}
"""What `python3 -m` runs."""


def _same(module: str, *names: str) -> dict[str, str]:
    """Names that are the same in a module of Caldera's."""
    return {name: f"{module}:{name}" for name in names}


_DISPATCH = (
    "Dispatch",
    "Execute",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
    "make_nd_compute_dataproto_dispatch_fn",
)
_COLOCATED = ("create_colocated_worker_cls", "create_colocated_worker_cls_fused")
_POOLS = ("split_resource_pool", "merge_resource_pool")
_MANAGERS = (
    "NaiveRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "PrimeRewardManager",
)
_ROLES = _same("caldera.workers", "ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker") | {
    "AsyncActorRolloutRefWorker": "caldera.workers:ActorRolloutRefWorker"
}
_OF_RAY = (
    _same("caldera.single_controller.ray_group", "RayWorkerGroup", "RayClassWithInitArgs")
    | _same("caldera.single_controller.ray_pool", "RayResourcePool", "SubRayResourcePool", *_POOLS)
    | _same("caldera.single_controller", *_COLOCATED)
)
_OF_BASE = _same(
    "caldera.single_controller", "Worker", "WorkerGroup", "ClassWithInitArgs", "ResourcePool"
)
_REGISTERED = {
    "register": "caldera.reward:REWARD_MANAGERS.register",
    "get_reward_manager_cls": "caldera.reward:REWARD_MANAGERS.__getitem__",
}
_TIMER = _same("verl._adapters", "marked_timer")
_TOKENIZERS = _same("caldera.data", "hf_tokenizer") | _same("verl._adapters", "hf_processor")

CORE = {
    "verl.protocol": {ALL_OF: "caldera.protocol"},
    "verl.single_controller.base": _OF_BASE,
    "verl.single_controller.base.worker": _same("caldera.single_controller", "Worker"),
    "verl.single_controller.base.worker_group": _OF_BASE,
    "verl.single_controller.base.decorator": _same("caldera.single_controller", *_DISPATCH),
    "verl.single_controller.ray": _OF_RAY
    | _same("caldera.single_controller", "ResourcePoolManager"),
    "verl.single_controller.ray.base": _OF_RAY,
    "verl.trainer.ppo.core_algos": {ALL_OF: "caldera.core_algos"},
    "verl.trainer.ppo.ray_trainer": {
        "RayPPOTrainer": "caldera.trainer.ppo.trainer:PPOTrainer",
        **_same("caldera.single_controller", "ResourcePoolManager", "Role"),
        **_same("verl._adapters", "apply_kl_penalty", "compute_advantage", "compute_response_mask"),
    },
    "verl.trainer.ppo.utils": {
        **_same("caldera.single_controller", "Role"),
        "need_critic": "caldera.config:needs_critic",
        "need_reference_policy": "caldera.config:needs_reference",
    },
    "verl.trainer.ppo.metric_utils": {
        **_same("caldera.trainer.ppo.metrics", "compute_timing_metrics"),
        **_same("caldera.trainer.metrics", "reduce_metrics"),
        **_same("caldera.trainer.ppo.validation", "process_validation_metrics"),
        **_same("verl._adapters", "compute_data_metrics"),
        "compute_throughout_metrics": "caldera.trainer.ppo.metrics:compute_throughput_metrics",
    },
    "verl.trainer.ppo.reward": {
        **_same("caldera.reward", "compute_reward"),
        **_same("verl._adapters", "get_custom_reward_fn", "load_reward_manager"),
    },
    "verl.trainer.config": {
        **_same("caldera.config", "CheckpointConfig"),
        "AlgoConfig": "caldera.config:AlgorithmConfig",
        "KLControlConfig": "caldera.config:KLControlConfig",
    },
}
"""The batch, the controller, the trainer."""

WORKERS = {
    "verl.workers.fsdp_workers": _ROLES,
    "verl.workers.megatron_workers": _ROLES,
    "verl.workers.engine_workers": _ROLES,
    "verl.workers.config": {
        **_same("caldera.config", "ActorConfig", "CriticConfig", "OptimizerConfig"),
        **_same("caldera.config", "RolloutConfig"),
        "FSDPEngineConfig": "caldera.config:FSDPConfig",
        "HFModelConfig": "caldera.config:ModelConfig",
    },
    "verl.workers.reward_manager": {
        **_same("caldera.reward", *_MANAGERS),
        **_REGISTERED,
        "AbstractRewardManager": "caldera.reward:RewardManager",
    },
    "verl.workers.reward_manager.abstract": {
        "AbstractRewardManager": "caldera.reward:RewardManager",
        "RawRewardFn": "caldera.reward.custom:ScoreFunction",
    },
    "verl.workers.reward_manager.registry": _REGISTERED,
    "verl.workers.reward_manager.naive": _same("caldera.reward", "NaiveRewardManager"),
    "verl.workers.reward_manager.batch": _same("caldera.reward", "BatchRewardManager"),
    "verl.workers.reward_manager.dapo": _same("caldera.reward", "DAPORewardManager"),
    "verl.workers.reward_manager.prime": _same("caldera.reward", "PrimeRewardManager"),
    "verl.experimental.reward_loop.reward_manager": {
        **_same("verl._adapters", "RewardManagerBase"),
        "register": "caldera.reward:REWARD_MANAGERS.register",
    },
    "verl.experimental.reward_loop.reward_manager.base": _same(
        "verl._adapters", "RewardManagerBase"
    ),
}
"""The roles and the rewards."""

UTILS = {
    "verl.utils": _TOKENIZERS,
    "verl.utils.tokenizer": _TOKENIZERS,
    "verl.utils.fs": _same("verl._adapters", "copy_to_local"),
    "verl.utils.import_utils": {
        "load_extern_object": "verl._adapters:load_extern_object",
        "load_extern_type": "verl._adapters:load_extern_object",
    },
    "verl.utils.dataset": _same("caldera.data", "RLHFDataset", "SFTDataset", "collate_fn"),
    "verl.utils.dataset.rl_dataset": _same("caldera.data", "RLHFDataset", "collate_fn"),
    "verl.utils.dataset.sft_dataset": _same("caldera.data", "SFTDataset"),
    "verl.utils.dataset.multiturn_sft_dataset": _same("caldera.data", "MultiTurnSFTDataset"),
    "verl.experimental.dataset.sampler": _same(
        "caldera.data", "AbstractSampler", "AbstractCurriculumSampler"
    ),
    "verl.utils.torch_functional": {
        **_same("caldera.core_algos", "masked_var", "masked_whiten", "entropy_from_logits"),
        **_same("caldera.core_algos", "entropy_from_logits_with_chunking"),
        **_same("verl._adapters", "logprobs_from_logits", "masked_mean", "masked_sum"),
    },
    "verl.utils.model": {
        "compute_position_id_with_mask": "caldera.data:compute_position_ids",
    },
    "verl.utils.metric": _same("caldera.trainer.metrics", "reduce_metrics"),
    "verl.utils.debug": _TIMER,
    "verl.utils.profiler": _TIMER,
    "verl.utils.tracking": _same("caldera.tracking", "Tracking"),
    "verl.utils.seqlen_balancing": {
        **_same("caldera.protocol.balance", "get_seqlen_balanced_partitions"),
        **_same("caldera.protocol.balance", "log_seqlen_unbalance"),
        **_same("verl._adapters", "get_reverse_idx"),
    },
    "verl.utils.reward_score": {
        **_same("caldera.reward_score", "default_compute_score", "gsm8k", "geo3k"),
        **_same("caldera.reward_score", "math_dapo", "prime_code", "prime_math"),
        "math": "caldera.reward_score:hendrycks_math",
        "math_reward": "caldera.reward_score:hendrycks_math",
        "search_r1_like_qa_em": "caldera.reward_score:qa_em",
    },
    **{
        f"verl.utils.reward_score.{name}": {ALL_OF: f"caldera.reward_score.{here}"}
        for name, here in {
            "gsm8k": "gsm8k",
            "geo3k": "geo3k",
            "math": "hendrycks_math",
            "math_reward": "hendrycks_math",
            "math_dapo": "math_dapo",
            "prime_code": "prime_code",
            "prime_math": "prime_math",
            "search_r1_like_qa_em": "qa_em",
        }.items()
    },
}
"""What extensions use besides."""

ENTRIES = {
    "verl.trainer.main_ppo": _same("caldera.trainer.main_ppo", "main", "run_ppo")
    | _same("caldera.trainer.ppo.setup", "TaskRunner"),
    "verl.trainer.main_ppo_v0": _same("caldera.trainer.main_ppo", "main", "run_ppo"),
    "verl.trainer.main_generation": _same("caldera.commands.generate", "main"),
    "verl.trainer.main_generation_server": _same("caldera.commands.generation_server", "main"),
    "verl.trainer.main_eval": _same("caldera.commands.eval", "main"),
    "verl.trainer.fsdp_sft_trainer": {"main": ENTRY_POINTS["verl.trainer.fsdp_sft_trainer"]},
    "verl.trainer.sft_trainer": {"main": ENTRY_POINTS["verl.trainer.sft_trainer"]},
    "verl.trainer.sft_trainer_ray": {"main": ENTRY_POINTS["verl.trainer.sft_trainer_ray"]},
    "verl.model_merger": {"main": ENTRY_POINTS["verl.model_merger"]},
}

_TOOL_SCHEMAS = ("OpenAIFunctionSchema", "OpenAIFunctionToolSchema")
_LOOPS = _same(
    "caldera.agent_loop.base", "AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register"
)
_SINGLE_TURN = _same("caldera.agent_loop.sampling", "SingleTurnAgentLoop")
_TOOL_AGENT = _same("caldera.agent_loop.tool_agent", "ToolAgentLoop")

AGENTS = {
    "verl.tools.base_tool": _same("caldera.tools.base", "BaseTool"),
    "verl.tools.schemas": {
        **_same("caldera.tools.schemas", *_TOOL_SCHEMAS),
        **_same("caldera.tools.base", "ToolResponse"),
    },
    "verl.tools.function_tool": _same("caldera.tools.function_tool", "function_tool"),
    "verl.tools.gsm8k_tool": _same("caldera.tools.gsm8k", "Gsm8kTool"),
    "verl.tools.search_tool": _same("caldera.tools.search", "SearchTool"),
    "verl.tools.sandbox_fusion_tools": _same("caldera.tools.programs", "SandboxFusionTool"),
    "verl.tools.mcp_base_tool": {"MCPBaseTool": "caldera.tools.mcp:MCPTool"},
    "verl.tools.mcp_search_tool": {"MCPSearchTool": "caldera.tools.mcp:MCPTool"},
    "verl.interactions.base": _same("caldera.interactions.base", "BaseInteraction"),
    "verl.interactions.gsm8k_interaction": _same(
        "caldera.interactions.gsm8k_interaction", "Gsm8kInteraction"
    ),
    "verl.experimental.agent_loop": _LOOPS | _SINGLE_TURN | _TOOL_AGENT,
    "verl.experimental.agent_loop.agent_loop": _LOOPS,
    "verl.experimental.agent_loop.single_turn_agent_loop": _SINGLE_TURN,
    "verl.experimental.agent_loop.tool_agent_loop": _TOOL_AGENT,
    "verl.experimental.agent_loop.tool_parser": _same(
        "caldera.tools.formats", "FunctionCall", "ToolParser"
    ),
}
"""Tools, interactions and agent loops."""

NAMES: dict[str, dict[str, str]] = CORE | WORKERS | UTILS | ENTRIES | AGENTS
