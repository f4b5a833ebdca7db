#!/usr/bin/env bash
# The same on a CPU: a tiny model that guesses learns to search before it answers.
#   bash examples/search_r1/run_cpu.sh [key=value ...]
set -euo pipefail
OUT=${OUT:-runs/search_r1_tiny}
SEED=${SEED:-1}
STEPS=${STEPS:-10}
PORT=${PORT:-8000}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }
. "$here/retriever.sh"

[ -d "$OUT/task" ] || python3 "$here/tiny_task.py" "$OUT/task"
[ -d "$OUT/index" ] || caldera retriever build --corpus "$OUT/task/corpus.jsonl" --index "$OUT/index"
start_retriever "$OUT/index"

caldera train \
  algorithm.adv_estimator=grpo \
  do_search=true max_turns=1 retriever.url="http://127.0.0.1:$PORT/retrieve" retriever.topk=1 \
  data.train_files="$OUT/task/train.parquet" data.val_files="$OUT/task/test.parquet" \
  data.train_batch_size=16 data.max_start_length=4 data.max_response_length=6 \
  data.max_obs_length=30 \
  actor_rollout_ref.model.path="$OUT/task/model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=false \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.optim.lr=5e-4 \
  actor_rollout_ref.actor.state_masking=true \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.seed="$SEED" \
  trainer.logger=file trainer.total_training_steps="$STEPS" trainer.test_freq=2 \
  trainer.default_local_dir="$OUT/seed$SEED" trainer.validation_data_dir="$OUT/seed$SEED/validation" \
  "$@"
