#!/usr/bin/env bash
# test.sh [--all] [PYTEST ARGUMENTS]: lint, types and tests, in the environment that quickstart.sh makes plus the test extras.
# Checks that take long run when what they guard has changed (scripts/guarded.py); with --all, for a nightly run, always.
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
  for name in smollm2 gemma minilm; do .venv/bin/python scripts/fetch_models.py "$name" || true; done
}

# libtpu lies beside the environment, not in it: there, JAX would look for a TPU at every start.
compile_tpu_kernels() {
  local folder=.cache/libtpu-$LIBTPU
  [ -e "$folder/libtpu" ] || pip_install --no-deps --target "$folder" "libtpu==$LIBTPU"
  PYTHONPATH=.:scripts:$folder .venv/bin/python scripts/compile.py tpu_kernels --topology v6e:1x1 --cases llama-3-8b --kv bfloat16 &&
    PYTHONPATH=.:scripts:$folder .venv/bin/python scripts/compile.py tpu_grouped_matmul --topology v6e:1x1 --cases qwen3-30b-a3b
}

ensure_env test
failed=0 all=0
[ "${1:-}" != --all ] || { all=1; shift; }
must_run() { [ "$all" = 1 ] || .venv/bin/python scripts/guarded.py changed "$1"; }
guarded() { # CHECK COMMAND...: run a check that has to, and record that it passed
  local check=$1
  shift
  "$@" && .venv/bin/python scripts/guarded.py record "$check"
}

part "model files" fetch_models
part "ruff check" .venv/bin/ruff check . || failed=1
part "ruff format" .venv/bin/ruff format --check . || failed=1
# Beside the tests, which leave the cores idle now and then.
types_log=$(mktemp) tpu_log=$(mktemp)
.venv/bin/pyright --warnings >"$types_log" 2>&1 &
types=$!
kernels=
if must_run tpu_compiler; then
  compile_tpu_kernels >"$tpu_log" 2>&1 &
  kernels=$!
fi
run_pytest() { .venv/bin/python -m pytest --durations=15 --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"; }
# The interpreter of GPU kernels waits for ever with the two threads that XLA has on two cores: NPROC gives it more.
run_kernels() { NPROC=8 run_pytest "$@"; }
checks= # those so far, joined by "or"
guarded_tests() { # CHECK RUN FOLDER...: run the tests that are marked with a check's name
  checks+=${checks:+ or }$1
  if must_run "$1"; then
    part "pytest, $1" guarded "$1" "$2" -m "$1" "${@:3}"
  else
    report+=("pytest, $1: passed before, on the same sources")
  fi
}
if [ $# = 0 ]; then
  guarded_tests kernels run_kernels tests/pallas_kernels tests/scripts || failed=1
  guarded_tests engine_kernels run_kernels tests/e2e || failed=1
  guarded_tests cpu_kernels run_pytest tests/pallas_kernels || failed=1
  guarded_tests models run_pytest tests/models || failed=1
  guarded_tests loading run_pytest tests/loading || failed=1
  guarded_tests sampling run_pytest tests/sampling || failed=1
  guarded_tests parsers run_pytest tests/parsers || failed=1
  guarded_tests server run_pytest tests/async_engine tests/cli tests/scripts tests/server || failed=1
  guarded_tests device run_pytest tests/e2e tests/execution tests/models tests/scripts || failed=1
  guarded_tests families run_pytest tests/e2e || failed=1
  guarded_tests engine run_pytest tests/e2e || failed=1
  guarded_tests goldens_notice run_pytest tests/models || failed=1
  part "pytest" run_pytest -m "not ($checks)" || failed=1
elif [[ "$*" == *pallas_kernels* ]]; then
  part "pytest" run_kernels "$@" || failed=1
else
  part "pytest" run_pytest "$@" || failed=1
fi

finish() { # PROCESS LOG: wait for what runs beside, and show what it said
  local status=0
  wait "$1" || status=$?
  cat "$2"
  rm "$2"
  return "$status"
}
part "pyright" finish "$types" "$types_log" || failed=1
[ -z "$kernels" ] || part "TPU kernels" guarded tpu_compiler finish "$kernels" "$tpu_log" || failed=1

for line in "${report[@]}" "in all: $SECONDS s"; do say "$line"; done
exit "$failed"
