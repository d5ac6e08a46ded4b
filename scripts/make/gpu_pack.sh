#!/usr/bin/env bash
# gpu_pack.sh: make pack/ for a rented machine without network that has jax, torch and transformers: the sources, jaxllm's
# other packages, a ptxas without known bugs (13.3 or later), and SmolLM2 in parts. Every file is under 60 MiB and has its
# checksum in SHA256SUMS. The packages are for this .venv's Python version and processor, which the machine must share. There: tar -xzf pack/source.tar.gz && scripts/gpu_check.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/lib.sh

MOST_BYTES=$((60 << 20)) PART_BYTES=$((34 << 20))

[ -x .venv/bin/python ] || die "there is no .venv: run scripts/quickstart.sh first"
rm -rf pack
mkdir pack
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
download() { # FOLDER PACKAGE...
  .venv/bin/python -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d "$@"
}

say "sources"
[ -z "$(git status --porcelain)" ] || say "what is not committed stays behind"
git rev-parse --short=12 HEAD >pack/REVISION
git archive --format=tar.gz -o pack/source.tar.gz HEAD

say "packages"
mapfile -t packages < <(.venv/bin/python scripts/make/packages.py --without jax transformers llvmlite)
download pack "${packages[@]}"

say "ptxas"
download "$scratch" "nvidia-cuda-nvcc>=13.3"
.venv/bin/python -m zipfile -e "$scratch"/nvidia_cuda_nvcc-*.whl "$scratch"
gzip -9c "$(find "$scratch" -name ptxas)" >pack/ptxas.gz

say "SmolLM2"
model=$(.venv/bin/python scripts/fetch_models.py smollm2)
split -b $PART_BYTES -d -a 1 "$model" "pack/$(basename "$model").part"

(cd pack && sha256sum -- *) >"$scratch/SHA256SUMS"
mv "$scratch/SHA256SUMS" pack/
large=$(find pack -type f -size +${MOST_BYTES}c)
[ -z "$large" ] || die "these are too large to be sent: $large"
du -h pack/*
say "pack/ is made: $(du -sh pack | cut -f1)"
