#!/usr/bin/env bash
# GSM8K with Qwen2.5-Instruct, GRPO on a LoRA adapter. Variables are those of ../gsm8k_grpo.
#   MODEL=Qwen/Qwen2.5-7B-Instruct bash examples/gsm8k_lora/run_qwen.sh [key=value ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${OUT:-runs/gsm8k_lora_qwen} exec bash "$here/../gsm8k_grpo/run_qwen.sh" \
  actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=64 \
  actor_rollout_ref.actor.optim.lr=2e-5 \
  "$@"
