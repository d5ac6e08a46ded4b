#!/usr/bin/env bash
# grpc.sh: generate jaxllm/server/grpc/inference_pb2.py, and its types, from inference.proto beside it.
# The generator is that of the oldest gRPC that jaxllm[grpc] allows: its output runs with every later protobuf.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/lib.sh

oldest=$(sed -n 's/^grpc = .*"grpcio>=\([0-9.]*\)".*/\1/p' pyproject.toml)
python=$(find_python)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install -q --disable-pip-version-check "grpcio-tools==$oldest.*"
"$dir/venv/bin/python" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. jaxllm/server/grpc/inference.proto
say "wrote jaxllm/server/grpc/inference_pb2.py and inference_pb2.pyi with grpcio-tools $oldest"
