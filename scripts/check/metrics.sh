#!/usr/bin/env bash
# metrics.sh [URL]: check a server's metrics, such as http://localhost:8000/metrics, with Prometheus' promtool. Without a URL
# it starts a server without a model: once with --metrics-prefix jaxllm_, where promtool must be silent, and once with
# vLLM's names, where it may complain only of these: their colon, and a histogram that ends in _total. The exit status is
# promtool's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/lib.sh

command -v promtool >/dev/null || die "there is no promtool: it is in Debian's package prometheus (apt-get install prometheus)"
if [ $# -gt 0 ]; then
  curl -fsS "$1" | promtool check metrics
  exit
fi

python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  wait
  rm -rf "$folder"
}
trap finish EXIT

page() { # NAME FLAG...: write the metrics of a server with these flags that has answered a good request and a bad one
  local name=$1 log=$folder/$1.log url
  shift
  : >"$log"
  "$python" scripts/mock_server.py tests/data/tiny/llama3_tied --tokenizer "$folder/tokenizer" --dtype float32 \
    --host 127.0.0.1 --port 0 "$@" 2>"$log" &
  server=$!
  until url=$(grep -oE 'http://127[^ ]+' "$log"); do
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; die "the server has not started"; }
    sleep 0.2
  done
  curl -fsS "$url/v1/completions" -H 'content-type: application/json' -d '{"prompt": [5], "max_tokens": 4}' >/dev/null
  curl -sS "$url/v1/completions" -H 'content-type: application/json' -d '{}' >/dev/null
  curl -fsS "$url/metrics" >"$folder/$name"
  kill "$server" && wait "$server" || true
  server=
}

PYTHONPATH=. TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$python" -c 'import sys; from tests.e2e.tiny_tokenizer import save_tokenizer; from pathlib import Path
Path(sys.argv[1]).mkdir(); save_tokenizer(Path(sys.argv[1]))' "$folder/tokenizer"
page ours --metrics-prefix jaxllm_
promtool check metrics <"$folder/ours"
say "promtool has nothing to say of $(grep -c '^# TYPE' "$folder/ours") metrics with --metrics-prefix jaxllm_"
page vllm
promtool check metrics <"$folder/vllm" >"$folder/said" 2>&1 || true
if grep -v -e "should not contain ':'" -e '^vllm:iteration_tokens_total non-counter metrics' "$folder/said"; then
  die "promtool has said this of the metrics with vLLM's names"
fi
say "with vLLM's names it complains of their colon and of the histogram iteration_tokens_total, and of nothing else"
