#!/usr/bin/env bash
# benchmark.sh [ARGUMENTS OF benchmark.py]: compare with all peers, from a fresh clone: make jaxllm's environment and the
# peers' (PEERS, by default .cache/peers: 5 GB), fetch the model, and measure. With --readme it writes docs/performance.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

peers=${PEERS:-.cache/peers}
ensure_env benchmark
names=(hf vllm llamacpp)
[[ " $* " != *" --task embed "* && " $* " != *" --task pictures "* ]] || names=(hf vllm)
[[ " $* " != *" --task gguf "* ]] || names=(llamacpp)
bash scripts/peers.sh "$peers" "${names[@]}"
pythons=()
for peer in "${names[@]}"; do pythons+=("--$peer-python" "$peers/$peer/bin/python"); done
exec .venv/bin/python scripts/benchmark.py "${pythons[@]}" "$@"
