#!/usr/bin/env bash
# gpu_check.sh [--stage NAME...] [--resume] [--plan] [--dry-run]: run everything that needs a GPU, in 45 minutes, the
# likeliest failures first: the device, the kernels, a real model, then the speed of kernels and engines, and of other
# libraries. --plan shows the stages and their limits; README.md in this folder describes the use on a rented machine.
# Evidence goes to $OUT (default: benchmarks/results/gpu), JSON and a log for each process. PYTHON names another Python
# than .venv's; a pack/ from make/gpu_pack.sh is unpacked and used.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh
. scripts/lib/stages.sh

plan() {
  stop_on_failure=1
  stage device 240
  run sanity 90 scripts/check.py device sanity
  run write 90 scripts/check.py device write
  run decode-1 90 scripts/check.py device decode-1
  run decode-4 90 scripts/check.py device decode-4
  run decode-30 90 scripts/check.py device decode-30
  run prefill 90 scripts/check.py device prefill
  run step 90 scripts/check.py device step
  run step-latents 90 scripts/check.py device step-latents
  run step-states 90 scripts/check.py device step-states
  stop_on_failure=
  plan_answers
  stage decode 140 device numerics
  run bfloat16 110 scripts/bench.py kernels --only decode
  run fp8 110 scripts/bench.py kernels --only decode --kv fp8
  run torch 60 scripts/bench.py sdpa decode
  stage prefill 200 device numerics
  run bfloat16 110 scripts/bench.py kernels --only prefill
  run write 60 scripts/bench.py kernels --only write
  run torch 60 scripts/bench.py sdpa prefill
  stage recurrent 280 device
  run check 120 scripts/bench.py states --only check
  run times 150 scripts/bench.py states --only decode prefill
  stage latents 180 device
  run bfloat16 170 scripts/bench.py latents
  stage engine 150 device numerics
  run llama-3-8b 145 scripts/bench.py engine llama-3-8b
  stage engines 300 device recurrent latents
  run qwen3.6-27b 150 scripts/bench.py engine qwen3.6-27b --batches 64 1 64:2048
  run deepseek-v2-lite 150 scripts/bench.py engine deepseek-v2-lite --batches 64 1 64:2048
  stage matmuls 240 device
  run linear 120 scripts/bench.py matmuls --only linear --formats awq q4_k fp8 fp8-block mxfp4
  run experts 120 scripts/bench.py matmuls --only grouped
  stage successors 150 device decode prefill # of kernels that have run, see pallas_kernels/paged_attention/gpu/handover.py
  run decode 60 scripts/bench.py kernels --only decode --next --models llama-3-8b
  run decode-fp8 60 scripts/bench.py kernels --only decode --next --models llama-3-8b --kv fp8
  run prefill 60 scripts/bench.py kernels --only prefill --next --models llama-3-8b
  stage hf 120 device
  run llama-3-8b 115 scripts/bench.py hf llama-3-8b
}

unpack() { # pack/ into .cache/pack: wheels, ptxas first in PATH, the model once all its parts are here
  local to=.cache/pack wheel part parts
  (cd pack && sha256sum --quiet --ignore-missing --check SHA256SUMS) || die "pack/ is damaged"
  mkdir -p $to/bin $to/site $to/models
  for wheel in pack/*.whl; do
    [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" $to/site || die "could not unpack $wheel"
  done
  [ ! -e pack/ptxas.gz ] || { gunzip -c pack/ptxas.gz >$to/bin/ptxas && chmod +x $to/bin/ptxas; } || die "could not unpack ptxas"
  parts=$(sed -n 's/.* \*\?\(.*\.gguf\.part[0-9]*\)$/\1/p' pack/SHA256SUMS | sort)
  for part in $parts; do
    [ -e "pack/$part" ] || { say "pack/$part is not here yet: the stage smollm2 needs it"; parts=''; }
  done
  [ -z "$parts" ] || (cd pack && cat $parts) >"$to/models/$(basename "${parts%%.part*}")"
  PATH=$PWD/$to/bin:$PATH PYTHONPATH=$PYTHONPATH:$PWD/$to/site JAXLLM_CACHE=$PWD/$to
  export PATH PYTHONPATH JAXLLM_CACHE
}

[ ! -d pack ] || [[ " $* " == *" --plan "* ]] || unpack
follow_plan gpu "$@"
