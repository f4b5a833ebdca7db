#!/usr/bin/env bash
# GSM8K with SmolLM2-135M on one GPU, GRPO on a LoRA adapter. Data and supervised start are those of
# ../gsm8k_grpo, and so are the variables.
#   bash examples/gsm8k_lora/run_smollm2.sh [key=value of `caldera train` ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${OUT:-runs/gsm8k_lora} exec bash "$here/../gsm8k_grpo/run_smollm2.sh" \
  actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=64 \
  actor_rollout_ref.actor.optim.lr=1e-4 \
  "$@"
