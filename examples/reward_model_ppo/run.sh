#!/usr/bin/env bash
# A reward model learns from preference pairs; PPO with a critic learns from the reward model.
#   bash examples/reward_model_ppo/run.sh [key=value of `caldera train` ...]
set -euo pipefail
MODEL=${MODEL:-outputs/demo-tiny/start}   # the policy, and the start of reward model and critic
OUT=${OUT:-runs/reward_model_ppo}
SEED=${SEED:-1}
RM_STEPS=${RM_STEPS:-200}     # of 128 pairs each
STEPS=${STEPS:-30}            # of PPO: 64 prompts x 8 samples each
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }

[ -d "$OUT/data" ] || python3 "$here/prepare.py" "$OUT/data"

caldera rm \
  model.path="$MODEL" model.enable_gradient_checkpointing=false \
  data.train_files="$OUT/data/pairs_train.jsonl" data.val_files="$OUT/data/pairs_test.jsonl" \
  data.train_batch_size=128 data.max_length=16 \
  optim.lr=2e-3 trainer.seed="$SEED" trainer.total_training_steps="$RM_STEPS" \
  trainer.test_freq=50 trainer.save_freq="$RM_STEPS" trainer.logger=file \
  trainer.checkpoint.save_contents=[model,hf_model] \
  trainer.default_local_dir="$OUT/rm-seed$SEED"

caldera train \
  algorithm.adv_estimator=gae \
  data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=64 data.max_prompt_length=8 data.max_response_length=4 \
  reward_model.enable=true \
  reward_model.model.path="$OUT/rm-seed$SEED/global_step_$RM_STEPS/actor/huggingface" \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.enable_gradient_checkpointing=false \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.optim.lr=5e-4 \
  actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.02 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.max_num_seqs=512 \
  critic.model.path="$MODEL" critic.model.enable_gradient_checkpointing=false \
  critic.optim.lr=1e-3 \
  trainer.logger=file trainer.total_training_steps="$STEPS" trainer.test_freq=10 \
  trainer.default_local_dir="$OUT/ppo-seed$SEED" \
  trainer.validation_data_dir="$OUT/ppo-seed$SEED/validation" \
  "$@"
