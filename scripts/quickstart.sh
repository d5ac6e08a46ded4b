#!/usr/bin/env bash
# quickstart.sh: from a fresh clone to a model that answers. Makes .venv, installs jaxllm, fetches one small model, runs it on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

SECONDS=0
ensure_env
model=$(.venv/bin/python scripts/fetch_models.py smollm2)
suggest_accelerator
JAX_PLATFORMS=cpu .venv/bin/python scripts/quickstart.py "$model"
say "done in $SECONDS s; next: .venv/bin/jaxllm serve $model"
