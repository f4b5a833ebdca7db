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
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'compat/verl'}", "PATH": ""},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("False\n", "")
