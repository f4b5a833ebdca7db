#!/usr/bin/env bash
# The same in a minute or two on a CPU: a tiny model that seldom calls Python learns that it pays.
#   bash examples/retool/run_cpu.sh [key=value ...]
set -euo pipefail
OUT=${OUT:-runs/retool_tiny}
SEED=${SEED:-1}
STEPS=${STEPS:-12}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v caldera > /dev/null || caldera() { python3 -m caldera.cli "$@"; }

[ -d "$OUT/task" ] || python3 "$here/tiny_task.py" "$OUT/task"

caldera train --config-path "$here" --config-name retool \
  data.train_files="$OUT/task/train.parquet" data.val_files="$OUT/task/test.parquet" \
  custom_reward_function.path="$here/reward.py" \
  actor_rollout_ref.model.path="$OUT/task/model" \
  actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$here/tools.yaml" \
  trainer.experiment_name="seed$SEED" trainer.total_training_steps="$STEPS" \
  trainer.default_local_dir="$OUT/seed$SEED" trainer.validation_data_dir="$OUT/seed$SEED/validation" \
  "$@"
