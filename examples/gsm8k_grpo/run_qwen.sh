#!/usr/bin/env bash
# GSM8K with Qwen2.5-Instruct (0.5B, 1.5B, 7B) and GRPO, in the settings of verl's examples.
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash examples/gsm8k_grpo/run_qwen.sh [key=value ...]
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}  # folder, or name on the hub
RAW=${RAW:-}                                # folder with train.jsonl and test.jsonl; empty: the hub
OUT=${OUT:-runs/gsm8k_qwen}
SEED=${SEED:-1}
STEPS=${STEPS:-105}                         # 15 epochs of 7 batches of 1,024 prompts
LIMIT=${LIMIT:-}                            # take the first rows of each split only
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }

data=$OUT/data
if [ ! -f "$data/test.parquet" ]; then
  source=(--hub); [ -z "$RAW" ] || source=(--raw "$RAW")
  caldera data prepare gsm8k "${source[@]}" --output "$data" ${LIMIT:+--limit "$LIMIT"}
fi

caldera train \
  algorithm.adv_estimator=grpo \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.max_num_seqs=1024 \
  trainer.project_name=gsm8k trainer.experiment_name="$(basename "$MODEL")-seed$SEED" \
  trainer.total_training_steps="$STEPS" trainer.test_freq=5 trainer.save_freq=35 \
  trainer.max_actor_ckpt_to_keep=1 \
  trainer.default_local_dir="$OUT/seed$SEED" trainer.validation_data_dir="$OUT/seed$SEED/validation" \
  "$@"
