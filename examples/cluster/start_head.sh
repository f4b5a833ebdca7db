#!/usr/bin/env bash
# Start Ray on the first machine of a cluster. Prints the address that the others and the run need.
#   start_head.sh [ADDRESS] [RAY START OPTION ...]
# ADDRESS is the address by which the other machines reach this one; without it Ray picks one.
set -euo pipefail

port=${RAY_PORT:-6379}
address=()
if [[ ${1:-} == [0-9]* ]]; then
  address=("--node-ip-address=$1")
  shift
fi
exec ray start --head "${address[@]}" --port="$port" --disable-usage-stats "$@"
