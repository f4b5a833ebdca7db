#!/usr/bin/env bash
# GSM8K with SmolLM2-135M on one GPU: data, a supervised start, then GRPO from it.
#   bash examples/gsm8k_grpo/run_smollm2.sh [key=value of `caldera train` ...]
set -euo pipefail
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}  # folder, or name on the hub
RAW=${RAW:-}                                         # folder with train.jsonl and test.jsonl; empty: the hub
OUT=${OUT:-runs/gsm8k_smollm2}
SEED=${SEED:-1}
STEPS=${STEPS:-60}            # of GRPO; 256 prompts x 8 samples each
SFT_EPOCHS=${SFT_EPOCHS:-3}
SFT_KEYS=${SFT_KEYS:-}        # more key=value for `caldera sft`
LIMIT=${LIMIT:-}              # take the first rows of each split only
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }

data=$OUT/data
if [ ! -f "$data/sft_test.parquet" ]; then
  source=(--hub); [ -z "$RAW" ] || source=(--raw "$RAW")
  caldera data prepare gsm8k "${source[@]}" --output "$data" ${LIMIT:+--limit "$LIMIT"}
  python3 "$here/solutions.py" "$data"
fi

sft=$OUT/sft-seed$SEED
if [ ! -f "$sft/latest_checkpointed_iteration.txt" ]; then
  caldera sft \
    model.path="$MODEL" model.enable_gradient_checkpointing=false \
    data.train_files="$data/sft_train.parquet" data.val_files="$data/sft_test.parquet" \
    data.max_length=704 data.train_batch_size=64 \
    data.max_token_len_per_gpu=32768 \
    optim.lr=1e-4 trainer.total_epochs="$SFT_EPOCHS" trainer.seed="$SEED" \
    trainer.test_freq=after_each_epoch trainer.save_freq=1000000 \
    trainer.checkpoint.save_contents=[model,hf_model] \
    trainer.resume_mode=disable trainer.default_local_dir="$sft" $SFT_KEYS
fi
start=$sft/global_step_$(cat "$sft/latest_checkpointed_iteration.txt")/actor/huggingface

caldera train \
  algorithm.adv_estimator=grpo \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  data.train_batch_size=256 data.max_prompt_length=384 data.max_response_length=320 \
  actor_rollout_ref.model.path="$start" \
  actor_rollout_ref.model.enable_gradient_checkpointing=false \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
  actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model] \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.max_num_seqs=1024 \
  trainer.project_name=gsm8k trainer.experiment_name="smollm2-seed$SEED" \
  trainer.total_training_steps="$STEPS" trainer.test_freq=10 trainer.save_freq="$STEPS" \
  trainer.default_local_dir="$OUT/grpo-seed$SEED" \
  trainer.validation_data_dir="$OUT/grpo-seed$SEED/validation" \
  "$@"
