#!/usr/bin/env bash
# ReTool's training on GSM8K with one GPU: an instruct model learns when to run Python.
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct bash examples/retool/run_gpu.sh [key=value ...]
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}  # folder, or name on the hub; its template has tools
RAW=${RAW:-}                                # folder with train.jsonl and test.jsonl; empty: the hub
OUT=${OUT:-runs/retool}
SEED=${SEED:-1}
STEPS=${STEPS:-100}
LIMIT=${LIMIT:-}                            # take the first rows of each split only
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }

data=$OUT/data
if [ ! -f "$data/test.parquet" ]; then
  source=(--hub); [ -z "$RAW" ] || source=(--raw "$RAW")
  caldera data prepare gsm8k "${source[@]}" --output "$data" ${LIMIT:+--limit "$LIMIT"}
fi

caldera train --config-path "$here" --config-name retool \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  data.train_batch_size=128 data.max_prompt_length=768 data.max_response_length=2048 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.max_num_seqs=1024 \
  actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$here/tools.yaml" \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 trainer.test_freq=10 \
  trainer.experiment_name="seed$SEED" trainer.total_training_steps="$STEPS" \
  trainer.default_local_dir="$OUT/seed$SEED" trainer.validation_data_dir="$OUT/seed$SEED/validation" \
  "$@"
