#!/usr/bin/env bash
# commands.sh AGENT FOLDER URL KEY: run the command line agent in the npm folder FOLDER, unmodified: a replayed model makes
# it run a command and report the result. It has its own settings and folder, and reaches no remote host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
. scripts/lib.sh
agent=$1 folder=$2 url=$3 key=$4
bin=$folder/node_modules/.bin
case $agent in
  codex) tool=exec_command ;;
  claude-code | continue) tool=Bash ;;
  opencode) tool=bash ;;
  *) die "there is no agent $agent; there are codex, claude-code, opencode and continue" ;;
esac
work=$(mktemp -d "$folder/run.XXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/project"
printf 'one\ntwo\nthree\n' >"$work/project/poem.txt"
cd "$work/project"
closed=http://127.0.0.1:9 # a proxy that is none
question="With $tool, count the lines of the file that is here."
case $agent in
  codex)
    cat >"$work/home/config.toml" <<TOML
model = "model"
model_provider = "jaxllm"
[model_providers.jaxllm]
name = "jaxllm"
base_url = "$url/v1"
env_key = "JAXLLM_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
TOML
    answer=$(CODEX_HOME=$work/home JAXLLM_KEY=$key timeout 120 "$bin/codex" exec \
      --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$question" </dev/null 2>"$work/log.txt") ||
      { tail -20 "$work/log.txt" >&2; die "codex has failed"; }
    ;;
  claude-code)
    answer=$(HOME=$work/home ANTHROPIC_BASE_URL=$url ANTHROPIC_AUTH_TOKEN=$key ANTHROPIC_MODEL=model \
      ANTHROPIC_SMALL_FAST_MODEL=model CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 timeout 120 \
      "$bin/claude" -p "$question" --allowedTools Bash --max-turns 4 </dev/null 2>"$work/log.txt") ||
      { tail -20 "$work/log.txt" >&2; die "claude-code has failed: $answer"; }
    ;;
  opencode)
    cat >opencode.json <<JSON
{
  "autoupdate": false, "share": "disabled", "permission": {"bash": "allow"}, "model": "jaxllm/model",
  "provider": {"jaxllm": {"npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$url/v1", "apiKey": "$key"}, "models": {"model": {}}}}
}
JSON
    answer=$(HOME=$work/home OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 HTTPS_PROXY=$closed \
      timeout 120 "$bin/opencode" run "$question" </dev/null 2>"$work/log.txt") ||
      { tail -20 "$work/log.txt" >&2; die "opencode has failed: $answer"; }
    grep -q '3 poem.txt' "$work/log.txt" || { cat "$work/log.txt" >&2; die "opencode has not run the command"; }
    ;;
  continue)
    cat >"$work/home/config.yaml" <<YAML
name: local
version: 1.0.0
schema: v1
models:
  - {name: model, provider: openai, model: model, apiBase: "$url/v1", apiKey: "$key", roles: [chat]}
YAML
    answer=$(HOME=$work/home CONTINUE_TELEMETRY_ENABLED=0 HTTPS_PROXY=$closed timeout 120 "$bin/node" "$bin/cn" \
      --config "$work/home/config.yaml" --auto -p "$question" </dev/null 2>"$work/log.txt") ||
      { tail -20 "$work/log.txt" >&2; die "continue has failed: $answer"; }
    ;;
esac
echo "$agent: $answer"
[ "$(tail -n 1 <<<"$answer")" = "It has 3 lines." ]
