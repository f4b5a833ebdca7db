"""verl's documented command lines, as they are written there, and how tests start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from caldera.sandbox import Limits, Sandbox
from caldera.sandbox.server import SandboxServer

if TYPE_CHECKING:
    from tests.conftest import Lab

REPOSITORY = Path(__file__).parents[1]
START = "python3 -m verl.trainer.main_ppo"

PPO = """\
  data.train_files=$DATA/train.parquet data.val_files=$DATA/test.parquet \\
  data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=256 \\
  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \\
  critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
  critic.ppo_micro_batch_size_per_gpu=4 \\
  algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console trainer.val_before_train=False \\
  trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10 \\
  trainer.total_epochs=3"""

GRPO_WITH_VLLM = """\
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \\
  data.train_files="['$DATA/train.parquet']" data.val_files="['$DATA/val.parquet']" \\
  data.train_batch_size=64 data.max_prompt_length=2048 data.max_response_length=2048 \\
  actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.use_remove_padding=True \\
  actor_rollout_ref.model.enable_gradient_checkpointing=True \\
  actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.optim.lr=1e-6 \\
  actor_rollout_ref.actor.fsdp_config.param_offload=True \\
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async \\
  actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.temperature=1.0 \\
  actor_rollout_ref.rollout.top_p=0.9 trainer.nnodes=1 trainer.n_gpus_per_node=8 \\
  trainer.total_epochs=1 trainer.save_freq=100 trainer.test_freq=50 \\
  trainer.logger="['console','wandb']\""""

TOOLS = """\
  algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=False \\
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \\
  data.custom_cls.path=rows.py data.custom_cls.name=Rows \\
  data.max_response_length=16384 actor_rollout_ref.rollout.n=16 \\
  actor_rollout_ref.rollout.val_kwargs.n=30 actor_rollout_ref.rollout.multi_turn.enable=True \\
  actor_rollout_ref.rollout.multi_turn.max_user_turns=16 \\
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16 \\
  actor_rollout_ref.rollout.multi_turn.format=hermes \\
  actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"""

SEARCH = """\
  do_search=true max_turns=10 retriever.url=http://127.0.0.1:8000/retrieve retriever.topk=3 \\
  actor_rollout_ref.actor.state_masking=true \\
  algorithm.state_masking.start_state_marker="<information>" \\
  algorithm.state_masking.end_state_marker="</information>\""""

BEFORE = (
    "data.train_files=$DATA/train.parquet", "data.val_files=$DATA/test.parquet",
    "data.train_batch_size=4", "data.max_prompt_length=4", "actor_rollout_ref.model.path=$MODEL",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "trainer.logger=console",
)  # fmt: skip
"""What stands before a line that begins with dots."""

CALL = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(6*7)"}}</tool_call>'
WORDS = [
    "<pad>",
    "<eos>",
    CALL,
    "<search>Ada</search>",
    "<answer>Paris</answer>",
    "42",
    "Ada",
    "\n",
]
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n{% endif %}"
)


def bash(
    lab: Lab, folder: Path, line: str, *more: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A line as a shell takes it, with a user's own keys behind it. It must succeed."""
    paths = (REPOSITORY / "src", REPOSITORY / "compat/verl/src", folder)
    folders = (lab.warm.programs(), str(Path(sys.executable).parent), os.environ["PATH"])
    environment = lab.environment | {
        "PATH": os.pathsep.join(folders), "PYTHONPATH": ":".join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "DATA": str(lab.folder), "MODEL": str(lab.model), "WANDB_MODE": "offline",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", f'{line} "$@"', "bash", *more], cwd=folder, env=environment | variables,
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def small(lab: Lab) -> list[str]:
    """Sizes and paths of the lab's task."""
    return [
        "data.max_prompt_length=6", "data.max_response_length=4",
        f"actor_rollout_ref.model.path={lab.model}", f"critic.model.path={lab.model}",
    ]  # fmt: skip


def metrics(done: subprocess.CompletedProcess[str], step: int = 1) -> dict[str, float]:
    """What the console says of a step."""
    start = f"step:{step} - "
    rows = (line.removeprefix(start) for line in done.stdout.splitlines() if line.startswith(start))
    pairs = (part.rsplit(":", 1) for row in rows for part in row.split(" - "))
    return {name: float(value) for name, value in pairs}


def talkative_model(folder: Path) -> dict[str, str]:
    """A model that knows few words: untrained, it calls, searches and answers at random.

    Returns the variables DATA and MODEL of its folder, which has questions, too.
    """
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"<(tool_call|search|answer)>.*?</\1>|<\w+>|\w+|[\s\S]"), "isolated"
    )
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    # Heads of 32 are the least that vLLM's and SGLang's kernels take.
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
            tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        )
    ).save_pretrained(folder / "model")  # fmt: skip
    row: dict[str, Any] = {
        "data_source": "searchR1_nq",
        "prompt": [{"role": "user", "content": "Ada"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}},
    }
    for split in ("train", "test"):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([row] * 4), folder / f"{split}.parquet"
        )
    return {"DATA": str(folder), "MODEL": str(folder / "model")}


ROWS = """
from verl.utils.dataset.rl_dataset import RLHFDataset


class Rows(RLHFDataset):
    def __getitem__(self, item):
        return {**super().__getitem__(item), "agent_name": "tool_agent"}
"""
INTERPRETER = """
from verl.tools.sandbox_fusion_tools import SandboxFusionTool


class Interpreter(SandboxFusionTool):
    pass
"""
SCHEMA = {
    "name": "code_interpreter",
    "description": "Runs Python.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program."}},
        "required": ["code"],
    },
}


@contextmanager
def tools_of_verls(folder: Path) -> Iterator[None]:
    """The files that the line with tools names, and the sandbox that its tool asks."""
    (folder / "rows.py").write_text(ROWS)
    (folder / "my_tools.py").write_text(INTERPRETER)
    with (
        Sandbox(Limits(wall_seconds=10)) as sandbox,
        SandboxServer(sandbox, "127.0.0.1", 0) as server,
    ):
        tool = {
            "class_name": "my_tools.Interpreter",
            "config": {"type": "native", "sandbox_fusion_url": f"{server.url}/run_code"},
            "tool_schema": {"type": "function", "function": SCHEMA},
        }
        (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
        yield
