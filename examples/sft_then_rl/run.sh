#!/usr/bin/env bash
# Supervised training from random weights, then GRPO from its checkpoint. On a CPU.
#   bash examples/sft_then_rl/run.sh [key=value of `caldera train` ...]
set -euo pipefail
OUT=${OUT:-runs/sft_then_rl}
SEED=${SEED:-1}
SFT_STEPS=${SFT_STEPS:-400}   # of 128 sums each
STEPS=${STEPS:-250}           # of GRPO: 64 prompts x 8 samples each
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }

[ -d "$OUT/data" ] || python3 "$here/prepare.py" "$OUT/data"

caldera sft \
  model.path="$OUT/data/model" model.enable_gradient_checkpointing=false \
  data.train_files="$OUT/data/sft_train.parquet" data.val_files="$OUT/data/sft_test.parquet" \
  data.train_batch_size=128 data.max_length=16 \
  optim.lr=2e-3 optim.betas=[0.9,0.999] trainer.seed="$SEED" trainer.total_training_steps="$SFT_STEPS" \
  trainer.save_freq="$SFT_STEPS" trainer.test_freq="$SFT_STEPS" \
  trainer.checkpoint.save_contents=[model,hf_model] trainer.logger=file \
  trainer.default_local_dir="$OUT/sft-seed$SEED"

caldera train \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=64 data.max_prompt_length=8 data.max_response_length=4 \
  actor_rollout_ref.model.path="$OUT/sft-seed$SEED/global_step_$SFT_STEPS/actor/huggingface" \
  actor_rollout_ref.model.enable_gradient_checkpointing=false \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.optim.lr=2e-4 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.max_num_seqs=512 \
  trainer.logger=file trainer.total_training_steps="$STEPS" trainer.test_freq=10 \
  trainer.default_local_dir="$OUT/grpo-seed$SEED" \
  trainer.validation_data_dir="$OUT/grpo-seed$SEED/validation" \
  "$@"
