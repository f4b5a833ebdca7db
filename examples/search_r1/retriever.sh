# Sourced: `start_retriever INDEX` serves an index on 127.0.0.1:$PORT until the script ends.
start_retriever() {
  caldera retriever serve --index "$1" --topk 3 --port "$PORT" &
  trap "kill $!" EXIT
  for _ in $(seq 120); do
    kill -0 $! || return 1  # it has ended, and said why
    python3 -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$PORT/health')" 2> /dev/null && return
    sleep 1
  done
  echo "the retriever does not answer on port $PORT" >&2
  return 1
}
