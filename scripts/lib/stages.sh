# shellcheck shell=bash
# Shared by gpu_check.sh and tpu_check.sh: a plan of stages, each a few processes under time limits. Source it, define `plan`
# (stage NAME SECONDS [NEEDED STAGE...], each followed by its processes: run NAME SECONDS SCRIPT ARGUMENTS...), then call
# `follow_plan KERNELS "$@"`, where KERNELS (gpu or tpu) names the kernels of a dry run and the folder of evidence.
#
# A process leaves $out/STAGE/NAME.json, written as it goes, and NAME.log. It is done when its JSON says that it is complete.

USAGE='options: --stage NAME...  only these stages    --resume   leave out processes that are complete
         --plan           show the schedule     --dry-run  everything at toy size on a CPU, which measures nothing'
CALL_SECONDS=590 # rented machines often give a command ten minutes
GRACE=5          # from the first signal to the second, for a process that does not hear
DRY_SECONDS=1200

python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
export PYTHONPATH=.:scripts${PYTHONPATH:+:$PYTHONPATH}

follow_plan() { # KERNELS [OPTION...]
  local kernels=$1
  shift
  chosen=() resume=0 dry=() action=learn out=${OUT:-benchmarks/results/$kernels}
  local then=work
  while [ $# -gt 0 ]; do
    case $1 in
      --stage) while [ $# -gt 1 ] && [[ $2 != --* ]]; do chosen+=("$2"); shift; done ;;
      --resume) resume=1 ;;
      --plan) then=show ;;
      --dry-run)
        dry=(--dry-run "$kernels") out=${OUT:-$(mktemp -d)}
        # The interpreter's kernels would wait for ever for more threads than XLA takes of two cores.
        export JAX_PLATFORMS=cpu NPROC=8 JAX_DISABLE_MOST_OPTIMIZATIONS=1
        ;;
      -h | --help) echo "$USAGE"; exit ;;
      *) die "unknown argument $1; $USAGE" ;;
    esac
    shift
  done
  stages=() failed=() process='' call=1 call_seconds=0 total=0 calls=()
  plan
  local name
  for name in "${chosen[@]}"; do
    [[ " ${stages[*]} " == *" $name "* ]] || die "there is no stage $name; there are ${stages[*]}"
  done
  action=$then
  [ $action = show ] || say "evidence goes to $out"
  trap 'kill "$process" 2>/dev/null; exit 130' INT TERM
  plan
  [ $action = show ] && { show_calls; exit; }
  [ ${#failed[@]} = 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
}

stage() { # NAME SECONDS [NEEDED STAGE...]
  stage=$1 stage_seconds=$2 refusal=''
  shift 2
  case $action in
    learn) stages+=("$stage"); return ;;
    show) show_stage "$@"; return ;;
  esac
  [ ${#chosen[@]} = 0 ] || [[ " ${chosen[*]} " == *" $stage "* ]] || { refusal=unchosen; return; }
  local need log
  for need in "$@"; do
    for log in "$out/$need"/*.log; do
      [ ! -e "$log" ] || is_complete "${log%.log}.json" || refusal="it needs $need, where $(basename "$log" .log) failed"
    done
  done
  if [ -n "$refusal" ]; then
    say "$stage is not run: $refusal"
    failed+=("$stage: not run")
    return
  fi
  say "$stage, at most $stage_seconds s"
  stage_end=$((SECONDS + stage_seconds))
}

run() { # NAME SECONDS SCRIPT ARGUMENTS...
  local name=$1 seconds=$2 to=$out/$stage/$1 left status start=$SECONDS
  shift 2
  case $action in
    learn) return ;;
    show) printf '    %-18s %4d s  %s\n' "$name" "$seconds" "$*"; return ;;
  esac
  [ -z "$refusal" ] || return 0
  if [ $resume = 1 ] && is_complete "$to.json"; then
    say "$stage/$name is complete"
    return
  fi
  mkdir -p "$out/$stage"
  rm -f "$to.json"
  left=$((stage_end - SECONDS - GRACE))
  [ $left -ge "$seconds" ] || seconds=$left
  [ ${#dry[@]} = 0 ] || seconds=$DRY_SECONDS
  if [ "$seconds" -le 0 ]; then
    echo "the stage's time is over" | tee "$to.log"
    failed+=("$stage/$name: the stage's time is over")
    return
  fi
  timeout -k $GRACE "$seconds" "$python" "$@" "${dry[@]}" --json "$to.json" >"$to.log" 2>&1 &
  process=$!
  status=0
  wait $process || status=$?
  if is_complete "$to.json" && [ $status = 0 ]; then
    say "$stage/$name: $((SECONDS - start)) s, $(tail -n 1 "$to.log")"
    return
  fi
  case $status in
    124 | 137) status="killed after $seconds s" ;;
    0) status="it left no complete evidence" ;;
    *) status="exit status $status" ;;
  esac
  failed+=("$stage/$name: $status")
  tail -n 20 "$to.log"
  say "$stage/$name: $status ($to.log)"
  [ -z "${stop_on_failure:-}" ] || refusal="$name failed"
}

plan_answers() { # are the kernels right, and is a real model: the same questions for every device
  stage numerics 300 device
  run xla 150 scripts/check.py kernels --against xla
  run reference 200 scripts/check.py kernels --against reference
  stage families 150 device
  run float32 145 scripts/check.py families
  stage smollm2 240 device numerics
  run kernels 100 scripts/check.py goldens --enforce-eager
  run xla 100 scripts/check.py goldens --enforce-eager --backend xla
  run compiled-ahead 120 scripts/check.py goldens
}

is_complete() { grep -qs '"complete": true' "$1"; } # JSON

show_stage() { # [NEEDED STAGE...]
  if [ $((call_seconds + stage_seconds)) -gt $CALL_SECONDS ]; then
    call=$((call + 1)) call_seconds=0
  fi
  printf '%-10s %d:%02d to %d:%02d, %d s%s\n' "$stage" $((total / 60)) $((total % 60)) \
    $(((total + stage_seconds) / 60)) $(((total + stage_seconds) % 60)) "$stage_seconds" "${*:+, needs $*}"
  calls[call]+=" $stage"
  call_seconds=$((call_seconds + stage_seconds)) total=$((total + stage_seconds))
}

show_calls() {
  echo "in all $total s; as calls of at most $CALL_SECONDS s:"
  for call in "${calls[@]}"; do echo "  $0 --stage$call"; done
}
