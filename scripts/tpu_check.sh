#!/usr/bin/env bash
# tpu_check.sh [--stage NAME...] [--resume] [--plan] [--dry-run]: run everything that needs a TPU, as gpu_check.sh does for
# a GPU. Evidence goes to $OUT (default: benchmarks/results/tpu), JSON and a log for each process.
# PYTHON names another Python than .venv's. A v5e cannot hold Llama-3-8B: there the last process fails and its log says so.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh
. scripts/lib/stages.sh

plan() {
  stop_on_failure=1
  stage device 300
  run sanity 90 scripts/check.py device sanity
  run decode-1 90 scripts/check.py device decode-1
  run decode-short 90 scripts/check.py device decode-short
  run decode-30 90 scripts/check.py device decode-30
  run prefill 90 scripts/check.py device prefill
  run step 90 scripts/check.py device step
  run step-latents 90 scripts/check.py device step-latents
  run step-states 90 scripts/check.py device step-states
  stop_on_failure=
  plan_answers
  stage decode 240 device numerics
  run bfloat16 115 scripts/bench.py kernels --only decode
  run fp8 115 scripts/bench.py kernels --only decode --kv fp8
  stage prefill 180 device numerics
  run bfloat16 115 scripts/bench.py kernels --only prefill
  run fp8 115 scripts/bench.py kernels --only prefill --kv fp8
  stage recurrent 280 device
  run check 120 scripts/bench.py states --only check
  run times 150 scripts/bench.py states --only decode prefill
  stage latents 180 device
  run bfloat16 170 scripts/bench.py latents
  stage engine 450 device numerics
  run llama-3.2-1b 190 scripts/bench.py engine llama-3.2-1b
  run llama-3-8b 255 scripts/bench.py engine llama-3-8b
}

follow_plan tpu "$@"
