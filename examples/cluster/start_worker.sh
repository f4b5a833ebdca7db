#!/usr/bin/env bash
# Add this machine to a cluster that start_head.sh began.
#   start_worker.sh HEAD[:PORT] [RAY START OPTION ...]
set -euo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: $0 HEAD[:PORT] [ray start option ...]" >&2
  exit 2
fi
head=$1
shift
[[ $head == *:* ]] || head=$head:${RAY_PORT:-6379}
exec ray start --address="$head" --disable-usage-stats "$@"
