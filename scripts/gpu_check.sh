#!/usr/bin/env bash
# gpu_check.sh [--dry-run]: everything that only a GPU can show, as stages of at most 9 minutes that do not depend on each
# other: the kernels' numerics, their speed, and whole engines with dummy weights. Each writes its own JSON into
# $OUT (default: benchmarks/results/gpu). A stage that fails is named at the end; the others run all the same.
# On a bare machine PYTHON names one with jax and its CUDA plugin; packages it lacks are installed from wheels/ if that is
# there. --dry-run runs the same on a CPU, in the kernels' interpreters and at toy sizes: it measures nothing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python} out=${OUT:-benchmarks/results/gpu} dry=()
if [ "${1:-}" = --dry-run ]; then
  shift
  dry=(--dry-run gpu) out=${OUT:-$(mktemp -d)}
  export JAX_PLATFORMS=cpu NPROC=8 # the interpreter's kernels would wait for ever for more than XLA's two threads
fi
export PYTHONPATH=.:scripts${PYTHONPATH:+:$PYTHONPATH}
[ -d wheels ] && "$python" -m pip install -q --no-index --find-links wheels --no-deps wheels/*.whl
mkdir -p "$out"

failed=()
stage() { # NAME COMMAND...: at most 9 minutes
  local name=$1 start=$SECONDS
  shift
  [ ${#wanted[@]} = 0 ] || [[ " ${wanted[*]} " == *" $name "* ]] || return 0
  echo "== $name"
  timeout 540 "$@" "${dry[@]}" --json "$out/$name.json" || failed+=("$name ($?)")
  echo "== $name: $((SECONDS - start)) s"
}

wanted=("$@")
stage numerics "$python" scripts/check_kernels.py
stage decode "$python" scripts/bench_kernels.py --only decode
stage decode-fp8 "$python" scripts/bench_kernels.py --only decode --kv fp8
stage prefill "$python" scripts/bench_kernels.py --only prefill
stage write "$python" scripts/bench_kernels.py --only write
stage smollm2 "$python" scripts/bench_engine.py smollm2-135m
stage llama-3-8b "$python" scripts/bench_engine.py llama-3-8b
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
