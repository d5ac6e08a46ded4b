#!/usr/bin/env python3
"""Compile kernels and whole steps for hardware that is not there, with its real compilers, and check what they made.

    scripts/compile.py attention --target v6e:1x1 --cases llama-3-8b --kv bfloat16
    scripts/compile.py steps llama-3.2-1b --target h100 --layers 2

A TPU topology needs `libtpu` in the environment, a GPU needs jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc
(ptxas 13.3 or later). These are static figures: nothing runs. scripts/compile_check.sh makes such environments and
compiles everything.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

from jaxllm.check.compilers import compiler_environment
from jaxllm.resolve.hardware import find_topology
from pallas_kernels.targets import hopper_refusal

OPS = {
    "attention": {"tpu": "attention_tpu", "gpu": "attention_gpu"},
    "latents": {"tpu": "attention_tpu", "gpu": "latents_gpu"},
    "indexer": {"tpu": "indexer_tpu", "gpu": "indexer_gpu"},
    "grouped_matmul": {"tpu": "grouped_matmul", "gpu": "grouped_matmul"},
    "linear": {"tpu": "linear", "gpu": "linear"},
    "segment_attention": {"tpu": "segment_attention", "gpu": "segment_attention"},
    "states": {"tpu": "states", "gpu": "states"},
    "state_decodes": {"gpu": "state_decodes"},
    "steps": {"tpu": "steps", "gpu": "steps"},
}
"""The module of each op, by platform."""
HOPPER_OPS = ("latents", "indexer", "grouped_matmul", "segment_attention", "states", "state_decodes")
"""The ops whose kernels for GPUs are for Hopper only; other GPUs run them in plain XLA, as `steps` shows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=OPS, help="what to compile; with a target, --help shows the options of the op")
    parser.add_argument("--target", required=True, help="a topology such as v5e:1x1, v6e:1x1, tpu7x:1x1x1, a100, h100")
    parser.add_argument("--json", type=Path, metavar="OUT")
    words = [word for word in sys.argv[1:] if word not in ("-h", "--help")]
    known, _ = parser.parse_known_args(words or None)
    hardware, _ = find_topology(known.target)
    if hardware.platform not in OPS[known.op]:
        parser.error(f"{known.op} compiles for {' and '.join(OPS[known.op])} only")
    with tempfile.TemporaryDirectory() as folder:
        # Compilers read the environment when they are loaded.
        os.environ |= compiler_environment(hardware, dict(os.environ))
        os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1"}
        if known.op in ("steps", "segment_attention"):
            # XLA:GPU logs what ptxas says of its kernels.
            os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=3"}
        if known.op != "steps":
            os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
            os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        module = importlib.import_module(f"compile.{OPS[known.op][hardware.platform]}")
        parser.description = module.__doc__
        module.add_arguments(parser)
        args = parser.parse_args()
        target = importlib.import_module("compile.target").make_target(args.target, Path(folder))
        if target.is_gpu and args.op in HOPPER_OPS and (reason := hopper_refusal(target.architecture)):
            parser.error(f"{args.op}: {reason}; compile `steps` instead, which shows what runs there")
        return module.main(args, target)


if __name__ == "__main__":
    sys.exit(main())
