#!/usr/bin/env bash
# agents.sh codex|claude-code URL KEY: the command line agent, unmodified, has a command run by a replayed model, and
# tells its result. What it needs of npm is installed under .cache; its settings and its folder are its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/lib.sh
agent=$1 url=$2 key=$3
case $agent in
  codex) package=@openai/codex program=codex tool=exec_command ;;
  claude-code) package=@anthropic-ai/claude-code program=claude tool=Bash ;;
  *) die "there is no agent $agent; there are codex and claude-code" ;;
esac
folder=$PWD/.cache/clients/$agent
if [ ! -x "$folder/node_modules/.bin/$program" ]; then
  mkdir -p "$folder"
  npm install --prefix "$folder" --no-audit --no-fund --silent "$package" >&2
fi
work=$(mktemp -d "$folder/run.XXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/project"
printf 'one\ntwo\nthree\n' >"$work/project/poem.txt"
cd "$work/project"
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
    answer=$(CODEX_HOME=$work/home JAXLLM_KEY=$key timeout 120 "$folder/node_modules/.bin/codex" exec \
      --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$question" </dev/null 2>"$work/log.txt") ||
      { tail -20 "$work/log.txt" >&2; die "codex has failed"; }
    ;;
  claude-code)
    answer=$(HOME=$work/home ANTHROPIC_BASE_URL=$url ANTHROPIC_AUTH_TOKEN=$key ANTHROPIC_MODEL=model \
      ANTHROPIC_SMALL_FAST_MODEL=model CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 timeout 120 \
      "$folder/node_modules/.bin/claude" -p "$question" --allowedTools Bash --max-turns 4 </dev/null 2>"$work/log.txt") ||
      { tail -20 "$work/log.txt" >&2; die "claude-code has failed: $answer"; }
    ;;
esac
echo "$agent: $answer"
[ "$(tail -n 1 <<<"$answer")" = "It has 3 lines." ]
