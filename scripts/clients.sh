#!/usr/bin/env bash
# clients.sh [CLIENT...]: run real clients, unmodified and each in its own environment, against a server of SmolLM2, clients
# of embeddings against all-MiniLM-L6-v2, and clients of speech against Whisper base. Clients of agents run twice: with
# fixed answers from a core without a model, so that the results are known, and with SmolLM2, where a grammar forces the
# calls. Clients in TOLD run with fixed answers only: their prompts are longer than SmolLM2's context, or they check output
# that it cannot write. CLIENT-pictures sends a picture to a tiny model that sees; its text means nothing. Packages after
# "npm:" are npm's. The exit status is 0 if all named clients (by default all) passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

declare -A PACKAGES=(
  [openai]="openai>=2"
  [openai-lora]="openai>=2"
  [openai-audio]="openai>=2"
  [openai-pictures]="openai>=2"
  [langchain]="langchain-openai>=1"
  [langchain-pictures]="langchain-openai>=1"
  [litellm]="litellm>=1.100"
  [openai-decisions]="openai>=3.26"
  [langchain-decisions]="langchain-openai>=1.7.4"
  [langchain-typesafe]="langchain-typesafe==0.0.1a3"
  [systemone-client]="systemone-client>=0.1"
  [litellm-decisions]="litellm>=1.110"
  [lm-eval]="lm-eval[api]==0.4.13"
  [lm-eval-vllm]="-c requirements.lock -e . lm-eval[api]==0.4.13"
  [outlines]="outlines>=1.3 openai>=2 pydantic>=2"
  [guidellm]="guidellm>=0.8,<0.9"
  [schemathesis]="schemathesis>=4.30,<5"
  [tool-calls]="openai>=2 jsonschema>=4"
  [openai-agents]="openai-agents>=0.20"
  [anthropic]="anthropic>=2"
  [anthropic-pictures]="anthropic>=2"
  [pydantic-ai]="pydantic-ai-slim[openai,anthropic]>=2"
  [instructor]="instructor>=1.17 anthropic>=2"
  [llama-index-llm]="llama-index-llms-openai-like>=0.8 llama-index-core"
  [ollama]="ollama>=0.6"
  [langgraph]="langgraph>=1.2 langchain>=1 langchain-openai>=1"
  [aider]="aider-chat>=0.86.2"
  [codex]="npm:@openai/codex"
  [claude-code]="npm:@anthropic-ai/claude-code"
  [opencode]="npm:opencode-ai"
  [continue]="npm:node@22 @continuedev/cli"
  [vercel-ai]="npm:node@22 ai @ai-sdk/openai-compatible"
  [vercel-ai-pictures]="npm:node@22 ai @ai-sdk/openai-compatible"
  [openai-npm]="npm:node@22 openai"
  [openai-npm-audio]="npm:node@22 openai"
  [anthropic-npm]="npm:node@22 @anthropic-ai/sdk"
  [promptfoo]="npm:node@22 promptfoo"
  [openai-embeddings]="openai>=2"
  [langchain-embeddings]="langchain-openai>=1"
  [llama-index]="llama-index-embeddings-openai-like>=0.4"
  [cohere]="cohere>=5"
  [cohere-chat]="cohere>=5"
  [ollama-embeddings]="ollama>=0.6"
  [schemathesis-embeddings]="schemathesis>=4.30,<5"
)
AGENTS=" openai-agents anthropic cohere-chat pydantic-ai instructor llama-index-llm ollama langgraph vercel-ai openai-npm anthropic-npm \
promptfoo aider codex claude-code opencode continue "
COMMANDS=" codex claude-code opencode continue " # what agents/commands.sh runs
TOLD="$COMMANDS promptfoo aider "
PICTURES=" openai-pictures anthropic-pictures langchain-pictures vercel-ai-pictures "
POOLED=" openai-embeddings langchain-embeddings llama-index cohere ollama-embeddings \
schemathesis-embeddings "
AUDIO=" openai-audio openai-npm-audio "
DECISIONS=" openai-decisions langchain-decisions langchain-typesafe systemone-client litellm-decisions "
[ $# -gt 0 ] || set -- openai openai-lora langchain litellm lm-eval lm-eval-vllm outlines guidellm schemathesis \
  tool-calls $DECISIONS $PICTURES $AGENTS $POOLED $AUDIO
for client in "$@"; do
  [ -n "${PACKAGES[$client]:-}" ] || die "there is no client $client; there are: ${!PACKAGES[*]}"
done

ensure_env test
model=
work=$(mktemp -d)
stop() { # what has run in a subshell is no child of this shell: its process id is in a file
  [ -s "$work/pid" ] || return 0
  kill "$(cat "$work/pid")" 2>/dev/null || true
  for _ in $(seq 100); do kill -0 "$(cat "$work/pid")" 2>/dev/null || break; sleep 0.1; done
  rm "$work/pid"
}
trap 'stop; rm -rf "$work"' EXIT

port=$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
wait_ready() { # wait until what was started is
  for _ in $(seq 600); do
    curl -sf "$url/health" >/dev/null && return
    kill -0 "$(cat "$work/pid")" 2>/dev/null || break
    sleep 0.2
  done
  tail -20 "$work/server.txt" >&2
  die "the server has not started"
}

serve() { # NAME FLAGS...: start a server of a model that fetch_models.py knows
  local name=$1
  shift
  stop
  model=$(.venv/bin/python scripts/fetch_models.py "$name")
  JAX_PLATFORMS=cpu .venv/bin/jaxllm serve "$model" --host 127.0.0.1 --port "$port" --served-model-name "$name" \
    --enable-tokenizer-info-endpoint --api-key key --disable-uvicorn-access-log "$@" >"$work/server.txt" 2>&1 &
  echo $! >"$work/pid"
  wait_ready
}

serve_adapters() { # start a server of a tiny model with LoRA adapters; what HF gives with them goes into a file
  stop
  .venv/bin/python -c '
import json, sys
from pathlib import Path
from tests.e2e.adapter_data import golden_of, names_of, prompt_of
from tests.e2e.tiny_tokenizer import save_tokenizer
folder, case = Path(sys.argv[1]), "llama3_tied"
(folder / "tokenizer").mkdir(exist_ok=True)
save_tokenizer(folder / "tokenizer")
tokens = {name: golden_of(name, case).tokens for name in names_of(case)}
(folder / "goldens.json").write_text(json.dumps({"prompt": prompt_of(case), "tokens": tokens}))' "$work"
  JAX_PLATFORMS=cpu JAXLLM_ALLOW_RUNTIME_LORA_UPDATING=1 .venv/bin/jaxllm serve tests/data/tiny/llama3_tied \
    --host 127.0.0.1 --port "$port" --served-model-name tiny --tokenizer "$work/tokenizer" --dtype float32 \
    --enable-lora --max-loras 2 --max-lora-rank 8 --api-key key --enforce-eager \
    --lora-modules all=tests/data/adapters/llama3_tied/all mlp=tests/data/adapters/llama3_tied/mlp \
    >"$work/server.txt" 2>&1 &
  echo $! >"$work/pid"
  wait_ready
}

serve_pictures() { # start a server of a tiny model that sees; a picture goes into a file
  stop
  .venv/bin/python -c '
import sys
from tests.e2e.media_goldens import picture
picture("qwen2_vl", 0).save(sys.argv[1])' "$work/picture.png"
  JAX_PLATFORMS=cpu .venv/bin/jaxllm serve tests/data/media/qwen2_vl --host 127.0.0.1 --port "$port" \
    --served-model-name tiny --api-key key --enforce-eager --enable-prompt-tokens-details >"$work/server.txt" 2>&1 &
  echo $! >"$work/pid"
  wait_ready
}

serve_replies() { # start a server whose answers are told
  stop
  model=$(.venv/bin/python scripts/fetch_models.py smollm2)
  JAX_PLATFORMS=cpu .venv/bin/python scripts/mock_server.py "$model" --host 127.0.0.1 --port "$port" \
    --served-model-name model --api-key key --replies scripts/clients/agents/replies.json \
    --hf-overrides '{"max_position_embeddings": 131072}' >"$work/server.txt" 2>&1 &
  echo $! >"$work/pid"
  wait_ready
}

folder_of() { # CLIENT: make its environment; prints its folder
  local name=${1%-embeddings} packages=${PACKAGES[$1]}
  local folder=$PWD/.cache/clients/${name%-audio}
  if [ ! -e "$folder/installed" ]; then
    case $packages in
      npm:*)
        mkdir -p "$folder"
        # shellcheck disable=SC2086 # several packages
        npm install --prefix "$folder" --no-audit --no-fund --silent ${packages#npm:} >&2 || return
        ;;
      *)
        .venv/bin/python -m venv --clear "$folder" || return
        # shellcheck disable=SC2086
        "$folder/bin/python" -m pip install -q --disable-pip-version-check $packages >&2 || return
        ;;
    esac
    touch "$folder/installed"
  fi
  echo "$folder"
}

python_of() { # CLIENT: prints its Python
  local folder
  folder=$(folder_of "$1")
  echo "$folder/bin/python"
}

run_script() { # CLIENT [ARGUMENTS...]
  local folder script
  folder=$(folder_of "$1")
  script=$(find scripts/clients -name "use_${1//-/_}.*")
  if [[ $script == *.py ]]; then
    "$folder/bin/python" "$script" "$url" key "${@:2}"
    return
  fi
  # A module finds packages in the folders above its own. The proxy is closed, so that no remote host is reached.
  cp "$script" scripts/clients/agents/weather.mjs "$folder"
  HTTPS_PROXY=http://127.0.0.1:9 PROMPTFOO_CONFIG_DIR="$work/promptfoo" PROMPTFOO_DISABLE_TELEMETRY=1 \
    PROMPTFOO_DISABLE_UPDATE=1 PROMPTFOO_DISABLE_REMOTE_GENERATION=1 \
    timeout 300 "$folder/node_modules/.bin/node" "$folder/$(basename "$script")" "$url" key "${@:2}"
}

run_pictures() {
  serve_pictures
  run_script "${1%-pictures}" pictures "$work/picture.png"
}

run_audio() { run_script "$1" tests/data/media/speech.ogg; }

run_agent() {
  local folder
  serve_replies
  if [[ $COMMANDS == *" $1 "* ]]; then
    folder=$(folder_of "$1")
    scripts/clients/agents/commands.sh "$1" "$folder" "$url" key
  else
    run_script "$1" replayed
  fi
  [[ $TOLD != *" $1 "* ]] || return 0
  serve smollm2 --max-model-len 2048 --served-model-name model # the last name counts
  run_script "$1" smollm2
}

run_lm-eval() { # its log-likelihoods have to be those of this process
  run_script lm-eval >"$work/lm-eval.txt"
  tail -n 1 "$work/lm-eval.txt" >"$work/lm-eval.json"
  JAX_PLATFORMS=cpu .venv/bin/python scripts/clients/loglikelihoods.py "$model" "$work/lm-eval.json"
}

run_lm-eval-vllm() { # the same of its vllm backend, which jaxllm stands in for
  local python
  python=$(python_of lm-eval-vllm)
  cp -r tests/data/tiny/llama3_tied "$work/tiny"
  .venv/bin/python -c '
import sys
from tests.e2e.tiny_tokenizer import save_tokenizer
save_tokenizer(sys.argv[1])' "$work/tiny"
  JAX_PLATFORMS=cpu timeout 600 "$python" -m jaxllm.as_vllm scripts/clients/use_lm_eval_vllm.py "$work/tiny" \
    >"$work/lm-eval.txt"
  tail -n 1 "$work/lm-eval.txt" >"$work/lm-eval.json"
  JAX_PLATFORMS=cpu .venv/bin/python scripts/clients/loglikelihoods.py "$work/tiny" "$work/lm-eval.json"
}

run_guidellm() {
  local python
  python=$(python_of guidellm)
  for i in $(seq 40); do echo "{\"prompt\": \"Write about the number $i.\", \"output_tokens_count\": 16}"; done >"$work/data.jsonl"
  "$(dirname "$python")/guidellm" run --backend "kind=openai_http,target=$url,model=smollm2,api_key=key" \
    --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=20 --disable-progress \
    --data "kind=json_file,path=$work/data.jsonl" --output "kind=json,path=$work/guidellm.json"
  "$python" -c '
import json, sys
[run] = json.load(open(sys.argv[1]))["benchmarks"]
totals = run["metrics"]["request_totals"]
print("guidellm:", totals)
assert totals["successful"] >= 20 and not totals["errored"], totals' "$work/guidellm.json"
}

# Which values of the right type make sense, as two fields that contradict each other, no schema says: all checks but that one.
fuzz() {
  local python
  python=$(python_of schemathesis)
  (cd "$work" && "$(dirname "$python")/schemathesis" run "$url/openapi.json" --header "Authorization: Bearer key" \
    --phases examples,coverage,fuzzing --max-examples 100 --exclude-checks positive_data_acceptance \
    --continue-on-failure --no-color --generation-deterministic --request-timeout 120)
  ! grep -q Traceback "$work/server.txt" || { grep -A20 Traceback "$work/server.txt" >&2; return 1; }
}

run_schemathesis() {
  serve smollm2 --max-model-len 128 --max-num-seqs 16
  fuzz
}

run_schemathesis-embeddings() { fuzz; }

run_openai-lora() {
  serve_adapters
  run_script openai-lora "$work/goldens.json"
}

results=()
failed=0
served=
for client in "$@"; do
  say "$client"
  needed=smollm2
  [[ $POOLED != *" $client "* ]] || needed=minilm
  [[ $AUDIO != *" $client "* ]] || needed=whisper
  [[ $AGENTS != *" $client "* ]] || needed=agent # each has servers of its own
  [[ $PICTURES != *" $client "* && $client != openai-lora ]] || needed=agent
  [ "$client" != lm-eval-vllm ] || needed=$served # it has no server
  if [ "$served" != "$needed" ]; then
    case $needed in
      minilm) serve minilm ;;
      whisper) serve whisper --dtype float32 ;;
      smollm2) serve smollm2 --max-model-len 1024 ;;
    esac
    served=$needed
  fi
  [[ $client != schemathesis && $client != openai-lora ]] || served= # they have servers of their own
  start=$SECONDS run=run_$client
  declare -F "$run" >/dev/null || run="run_script $client"
  [[ $AGENTS != *" $client "* ]] || run="run_agent $client"
  [[ $PICTURES != *" $client "* ]] || run="run_pictures $client"
  [[ $AUDIO != *" $client "* ]] || run="run_audio $client"
  set +e
  (set -e; $run)
  status=$?
  set -e
  [ "$status" = 0 ] && results+=("$client: passed, $((SECONDS - start)) s") || { results+=("$client: FAILED"); failed=1; }
done
printf '%s\n' "${results[@]}"
exit "$failed"
