#!/usr/bin/env bash
# compile_check.sh [DIR]: compile every kernel, and the whole step of real models, with the real compilers of TPUs and of an
# H100, which need no device. Makes its environments under DIR (default: .cache/compile-check): jax with libtpu, with the
# CUDA plugin and with a ptxas of 13.3 or newer. Prints the tables, keeps them in benchmarks/results/compile_check.txt with
# the JSON beside it, and exits non-zero if anything is missed. Takes about an hour on two cores.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

dir=${1:-.cache/compile-check} out=benchmarks/results
versions=("0.12.0.1 0.0.51" "0.11.2 0.0.48") # jax, libtpu
mkdir -p "$dir" "$out/compile_check"
dir=$(cd "$dir" && pwd)
base=$(find_python) || exit 1

make_environment() { # JAX LIBTPU
  local env=$dir/jax-$1
  [ -e "$env/ready" ] && return
  say "making $env"
  "$base" -m venv --clear "$env" &&
    "$env/bin/python" -m pip install -q --disable-pip-version-check \
      "jax==$1" "jaxlib==$1" "libtpu==$2" "jax-cuda13-plugin==$1" "jax-cuda13-pjrt==$1" "nvidia-cuda-nvcc>=13.3" \
      flax msgspec numpy absl-py && touch "$env/ready" || die "could not make $env"
}

failed=()
compile() { # NAME COMMAND...
  local name=$1
  shift
  say "$name"
  "$python" "$@" --json "$out/compile_check/$name.json" || failed+=("$name")
}

check() {
  local jax libtpu python name model
  for entry in "${versions[@]}"; do
    read -r jax libtpu <<<"$entry"
    make_environment "$jax" "$libtpu"
    python=$dir/jax-$jax/bin/python
    PATH=$(dirname "$(find "$dir/jax-$jax" -name ptxas -type f | head -1)"):$PATH
    export PYTHONPATH=.:scripts
    for name in v5e:1x1 v6e:1x1 tpu7x:1x1x1; do
      compile "kernels-${name%%:*}-jax-$jax" scripts/compile_tpu_kernels.py --topology "$name"
    done
    compile "kernels-h100-jax-$jax" scripts/compile_gpu_kernels.py
    [ "$jax" = "${versions[0]%% *}" ] || continue # the whole steps once, with the version that is locked
    compile steps-v5e scripts/compile_steps.py v5e:1x1 llama-3.2-1b # 8 B parameters do not fit one v5e
    for model in llama-3.2-1b llama-3-8b qwen3-8b; do
      compile "steps-v6e-$model" scripts/compile_steps.py v6e:1x1 "$model"
      compile "steps-h100-$model" scripts/compile_steps.py h100 "$model"
    done
  done
  [ ${#failed[@]} = 0 ] || die "missed: ${failed[*]}"
}

check 2>&1 | tee "$out/compile_check.txt"
exit "${PIPESTATUS[0]}"
