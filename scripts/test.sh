#!/usr/bin/env bash
# test.sh [--all] [PYTEST ARGUMENTS]: lint, types and tests, in the environment that quickstart.sh makes plus the test extras.
# What always runs comes first. Checks that take long run when what they guard has changed (scripts/guarded.py); with
# --all, for a nightly run, always.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

SECONDS=0
report=()
part() { # NAME COMMAND...: run one part, show and keep its time; the script goes on, and fails at its end if a part did
  local name=$1 start=$SECONDS status=0
  shift
  say "$name"
  "$@" || status=$?
  [ "$status" = 0 ] && report+=("$name: ok, $((SECONDS - start)) s") || report+=("$name: FAILED ($status), $((SECONDS - start)) s")
  return "$status"
}

fetch_models() { # a missing model is for the tests to judge: some fail, some skip
  local name
  for name in smollm2 gemma minilm whisper; do .venv/bin/python scripts/fetch_models.py "$name" || true; done
}

# libtpu lies beside the environment, not in it: there, JAX would look for a TPU at every start.
compile_tpu_kernels='
set -e
. scripts/lib.sh
folder=.cache/libtpu-$LIBTPU
[ -e "$folder/libtpu" ] || pip_install --no-deps --target "$folder" "libtpu==$LIBTPU"
export PYTHONPATH=.:scripts:$folder
.venv/bin/python scripts/compile.py attention --target v6e:1x1 --cases llama-3-8b --kv bfloat16
.venv/bin/python scripts/compile.py grouped_matmul --target v6e:1x1 --cases qwen3-30b-a3b
'

ensure_env test
failed=0 all=0
[ "${1:-}" != --all ] || { all=1; shift; }
state=$(.venv/bin/python scripts/guarded.py status)
must_run() { [ "$all" = 1 ] || [ "$(field "$1" 2)" = run ]; }
field() { awk -F '\t' -v check="$1" -v number="$2" '$1 == check { print $number }' <<<"$state"; } # CHECK NUMBER
guarded() { .venv/bin/python scripts/guarded.py run "$1" -- "${@:2}"; } # CHECK COMMAND...: record it if it passes

part "model files" fetch_models
part "ruff check" .venv/bin/ruff check . || failed=1
part "ruff format" .venv/bin/ruff format --check . || failed=1
# Beside the tests, which leave the cores idle now and then.
types_log=$(mktemp) tpu_log=$(mktemp)
.venv/bin/pyright --warnings >"$types_log" 2>&1 &
types=$!
kernels=
if must_run tpu_compiler; then
  guarded tpu_compiler bash -c "$compile_tpu_kernels" >"$tpu_log" 2>&1 &
  kernels=$!
fi
pytest=(.venv/bin/python -m pytest --durations=15 --numprocesses 2 --dist loadfile --no-loadscope-reorder)
# The interpreter of GPU kernels waits for ever with the two threads that XLA has on two cores: NPROC gives it more.
interpreters=(env NPROC=8 "${pytest[@]}")
interpreted=(kernels engine_kernels)
checks=$(cut -f 1 <<<"$state" | grep -vx tpu_compiler) # those that passed the longest ago come first
ci_seconds=3000 # of CI's 5,400: the longest check takes half an hour; what is left stays to be run
# shellcheck disable=SC2086 # names without spaces
slow=$(printf ' or %s' $checks)
guarded_tests() { # CHECK COMMAND...: run the tests that are marked with a check's name
  local check=$1 name="pytest, $1"
  if must_run "$check" && [ "${CI:-}" = true ] && [ "$all" = 0 ] && [ "$SECONDS" -gt "$ci_seconds" ]; then
    report+=("$name: NOT RUN, the time for checks is over; it must run the next time ($(field "$check" 3))")
  elif must_run "$check"; then
    # shellcheck disable=SC2046 # the paths have no spaces
    part "$name ($(field "$check" 3))" guarded "${@}" -m "$check" $(.venv/bin/python scripts/guarded.py tests "$check")
  else
    report+=("$name: $(field "$check" 3)")
  fi
}
if [ $# = 0 ]; then
  part "pytest" "${pytest[@]}" -m "not (${slow# or })" || failed=1
  for check in $checks; do
    command=("${pytest[@]}")
    [[ " ${interpreted[*]} " != *" $check "* ]] || command=("${interpreters[@]}")
    guarded_tests "$check" "${command[@]}" || failed=1
  done
elif [[ "$*" == *pallas_kernels* ]]; then
  part "pytest" "${interpreters[@]}" "$@" || failed=1
else
  part "pytest" "${pytest[@]}" "$@" || failed=1
fi

finish() { # PROCESS LOG: wait for what runs beside, and show what it said
  local status=0
  wait "$1" || status=$?
  cat "$2"
  rm "$2"
  return "$status"
}
part "pyright" finish "$types" "$types_log" || failed=1
[ -z "$kernels" ] || part "TPU kernels" finish "$kernels" "$tpu_log" || failed=1

for line in "${report[@]}" "in all: $SECONDS s"; do say "$line"; done
exit "$failed"
