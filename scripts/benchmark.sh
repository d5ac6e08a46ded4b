#!/usr/bin/env bash
# benchmark.sh [ARGUMENTS OF benchmark.py]: the comparison with all peers, from nothing: jaxllm's environment, the peers'
# (PEERS, by default .cache/peers: 5 GB), the model, the measuring. With --readme it writes docs/performance.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

peers=${PEERS:-.cache/peers}
ensure_env benchmark
names=(hf vllm llamacpp)
[[ " $* " != *" --task embed "* ]] || names=(hf vllm)
[[ " $* " != *" --task gguf "* ]] || names=(llamacpp)
bash scripts/peers.sh "$peers" "${names[@]}"
pythons=()
for peer in "${names[@]}"; do pythons+=("--$peer-python" "$peers/$peer/bin/python"); done
exec .venv/bin/python scripts/benchmark.py "${pythons[@]}" "$@"
