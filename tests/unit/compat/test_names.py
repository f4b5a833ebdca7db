"""Names of verl's: each leads to something of Caldera's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from verl._finder import resolve
from verl._names import ALL_OF, CORE, ENTRIES, ENTRY_POINTS, NAMES, UTILS, WORKERS

REPOSITORY = Path(__file__).parents[3]
HERE = CORE | WORKERS | UTILS | ENTRIES
"""But for those of agents, whose tests are in a file of their own."""

EXTENSION = """
import verl
from verl import DataProto
from verl.protocol import DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics
from verl.trainer.ppo.ray_trainer import (
    RayPPOTrainer, ResourcePoolManager, Role, apply_kl_penalty, compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.reward import compute_reward, get_custom_reward_fn, load_reward_manager
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.fs import copy_to_local
from verl.utils.reward_score import default_compute_score, gsm8k
from verl.utils.reward_score.gsm8k import compute_score
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.utils.torch_functional import masked_mean
from verl.utils.tracking import Tracking
from verl.workers.reward_manager import NaiveRewardManager, register as register_manager
import verl.utils.torch_functional as verl_F
"""


PUBLIC = {
    "verl": "DataProto",
    "verl.protocol": (
        "BatchData DataProto DataProtoConfig DataProtoFuture DataProtoItem all_gather_data_proto "
        "collate_fn deserialize_single_tensor fold_batch_dim list_of_dict_to_dict_of_list "
        "pad_dataproto_to_divisor unfold_batch_dim union_numpy_dict union_tensor_dict "
        "unpad_dataproto"
    ),
    "verl.single_controller.base": "ClassWithInitArgs ResourcePool Worker WorkerGroup",
    "verl.single_controller.base.decorator": (
        "Dispatch Execute make_nd_compute_dataproto_dispatch_fn register register_dispatch_mode "
        "update_dispatch_mode"
    ),
    "verl.single_controller.ray": (
        "RayClassWithInitArgs RayResourcePool RayWorkerGroup ResourcePoolManager "
        "SubRayResourcePool create_colocated_worker_cls create_colocated_worker_cls_fused "
        "merge_resource_pool split_resource_pool"
    ),
    "verl.trainer.ppo.core_algos": (
        "agg_loss compute_gae_advantage_return compute_grpo_outcome_advantage compute_value_loss "
        "get_adv_estimator_fn get_policy_loss_fn kl_penalty register_adv_est register_policy_loss"
    ),
    "verl.trainer.ppo.ray_trainer": (
        "RayPPOTrainer ResourcePoolManager Role apply_kl_penalty compute_advantage "
        "compute_response_mask"
    ),
    "verl.trainer.ppo.metric_utils": (
        "compute_data_metrics compute_throughout_metrics compute_timing_metrics "
        "process_validation_metrics reduce_metrics"
    ),
    "verl.trainer.ppo.reward": "compute_reward get_custom_reward_fn load_reward_manager",
    "verl.utils": "hf_processor hf_tokenizer",
    "verl.utils.dataset.rl_dataset": "RLHFDataset collate_fn",
    "verl.utils.fs": "copy_to_local",
    "verl.utils.reward_score": "default_compute_score",
    "verl.utils.seqlen_balancing": (
        "get_reverse_idx get_seqlen_balanced_partitions log_seqlen_unbalance"
    ),
    "verl.utils.torch_functional": (
        "entropy_from_logits logprobs_from_logits masked_mean masked_sum masked_var masked_whiten"
    ),
    "verl.utils.tracking": "Tracking",
    "verl.workers.reward_manager": (
        "BatchRewardManager DAPORewardManager NaiveRewardManager PrimeRewardManager register"
    ),
    "verl.tools.base_tool": "BaseTool",
    "verl.tools.schemas": "OpenAIFunctionSchema OpenAIFunctionToolSchema ToolResponse",
    "verl.interactions.base": "BaseInteraction",
    "verl.experimental.agent_loop.agent_loop": "AgentLoopBase AgentLoopOutput register",
    **dict.fromkeys(
        (
            "verl.model_merger", "verl.trainer.fsdp_sft_trainer", "verl.trainer.main_eval",
            "verl.trainer.main_generation", "verl.trainer.main_generation_server",
            "verl.trainer.main_ppo", "verl.trainer.main_ppo_v0", "verl.trainer.sft_trainer",
            "verl.trainer.sft_trainer_ray",
        ),
        "main",
    ),
}  # fmt: skip
"""The names that users of verl are told of: what the table must have, whatever it has besides."""


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_every_public_name_can_be_imported(module: str) -> None:
    names: dict[str, object] = {}
    for name in PUBLIC[module].split():
        exec(f"from {module} import {name}", names)
        assert names[name] is not None


@pytest.mark.parametrize("module", sorted(HERE))
def test_every_name_leads_somewhere(module: str) -> None:
    imported = importlib.import_module(module)
    for name, target in HERE[module].items():
        if name == ALL_OF:
            assert imported.__all__ == sorted(resolve(target).__all__)
        else:
            assert getattr(imported, name) is not None
            assert name in dir(imported)


@pytest.mark.parametrize("module", sorted(ENTRY_POINTS))
def test_every_entry_point_is_there(module: str) -> None:
    assert module in NAMES
    assert callable(resolve(ENTRY_POINTS[module]))


def test_the_imports_of_extensions() -> None:
    names: dict[str, object] = {}
    exec(EXTENSION, names)
    from caldera.protocol import DataProto

    assert names["DataProto"] is DataProto


def test_star_imports() -> None:
    names: dict[str, object] = {}
    exec("from verl.trainer.ppo.core_algos import *", names)
    exec("from verl.utils.seqlen_balancing import *", names)
    assert {"agg_loss", "kl_penalty", "get_reverse_idx"} <= names.keys()


def test_what_is_not_there_is_an_error_as_ever() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from verl.utils.tracking import nonsense", {})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.utils\.nonsense'"):
        importlib.import_module("verl.utils.nonsense")
    with pytest.raises(AttributeError, match="module 'verl' has no attribute 'nonsense'"):
        exec("import verl; verl.nonsense", {})


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, verl.trainer.main_ppo, verl.utils.reward_score; "
        "assert verl.__version__; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True,
        env={"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'compat/verl/src'}", "PATH": ""},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("False\n", "")
