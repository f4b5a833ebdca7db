#!/usr/bin/env bash
# Search-R1 on one machine: data, index, retriever, GRPO with searches, evaluation.
#   RAW=downloads/search_qa CORPUS=downloads/search_qa/corpus.jsonl bash examples/search_r1/run_gpu.sh
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-3B}   # folder, or name on the hub
RAW=${RAW:-}                      # folder with questions.jsonl; empty: Search-R1's questions, from the hub
: "${CORPUS:?the passages: JSON lines with id and contents}"
OUT=${OUT:-runs/search_r1}
SEED=${SEED:-1}
STEPS=${STEPS:-200}
PORT=${PORT:-8000}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }
. "$here/retriever.sh"

if [ ! -f "$OUT/data/test.parquet" ]; then
  source=(--hub); [ -z "$RAW" ] || source=(--raw "$RAW")
  caldera data prepare search_qa_tags "${source[@]}" --output "$OUT/data"
fi
[ -d "$OUT/index" ] || caldera retriever build --corpus "$CORPUS" --index "$OUT/index"
start_retriever "$OUT/index"

caldera train \
  algorithm.adv_estimator=grpo \
  do_search=true max_turns=2 retriever.url="http://127.0.0.1:$PORT/retrieve" retriever.topk=3 \
  data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=128 data.max_start_length=1024 data.max_response_length=500 \
  data.max_obs_length=500 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
  actor_rollout_ref.actor.state_masking=true \
  actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model] \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.max_num_seqs=512 \
  trainer.project_name=search_r1 trainer.experiment_name="seed$SEED" \
  trainer.total_training_steps="$STEPS" trainer.test_freq=20 trainer.save_freq="$STEPS" \
  trainer.default_local_dir="$OUT/seed$SEED" trainer.validation_data_dir="$OUT/seed$SEED/validation" \
  "$@"
