#!/usr/bin/env bash
# lock.sh: write requirements.lock anew: the newest versions that pyproject.toml allows, with all dependencies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

python=$(find_python)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" - >"$dir/requirements.txt" <<'P'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + [line for name in ("serve", "grpc", "otel", "test", "dev") for line in extras[name]]
print("pip", *(line for line in wanted if not line.startswith("jaxllm[")), sep="\n")
P
say "resolving $(wc -l <"$dir/requirements.txt") requirements with $("$python" -V)"
"$python" -m venv "$dir/venv"
pip=("$dir/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -q --upgrade pip
"${pip[@]}" install -q -r "$dir/requirements.txt"
{
  echo "# Everything jaxllm[dev] depends on, for \`pip install -c requirements.lock\`. Written by scripts/lock.sh."
  echo "# The accelerator extras (cuda13, tpu, check) are not pinned here: they follow jax."
  "${pip[@]}" freeze --all
} >"$dir/lock"
mv "$dir/lock" requirements.lock
say "wrote requirements.lock: $(grep -vc '^#' requirements.lock) packages"
