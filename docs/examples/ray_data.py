#!/usr/bin/env python3
"""Generate for a dataset of any size with Ray Data, and resume where the last run ended.

    pip install 'jaxllm[ray]'
    python docs/examples/ray_data.py MODEL prompts.parquet answers --progress progress

Each row of prompts.parquet, a file or a folder of files, has a unique `id` and a `prompt`, and may have other columns.
The rows of answers, a folder of Parquet files, have an `answer` as well. Rows are read, generated for and written a
batch at a time, so the dataset may be larger than memory: Ray reads only as far ahead as the engines need. The ids of
written rows are kept in progress. If the command ends for any reason, the same command skips these rows when it is
started again. The ids are deleted once all rows are written.

By default it runs on this machine. In a Ray cluster, with folders that all nodes have or s3:// addresses, `--workers`
is the number of engines, and `--gpus` or `--tpus` the devices of each.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
import ray.data
from ray.data.checkpoint import CheckpointConfig

from jaxllm import LLM, SamplingParams


class Generate:
    """An engine in a Ray actor that generates for one batch of rows at a time."""

    def __init__(self, model: str, num_devices: int, max_tokens: int) -> None:
        self._llm = LLM(model, tensor_parallel_size=num_devices, disable_log_stats=True)
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the rows with their answers."""
        outputs = self._llm.generate(rows["prompt"].tolist(), self._params, use_tqdm=False)
        return rows | {"answer": np.array([output.outputs[0].text for output in outputs])}


def main() -> None:
    """Generate for all rows that have no answer yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder, or .gguf file")
    parser.add_argument("prompts", help="Parquet: a file, or a folder of files")
    parser.add_argument("answers", help="folder")
    parser.add_argument("--progress", required=True, help="folder for the ids of written rows")
    parser.add_argument("--workers", type=int, default=1, help="engines; default: 1")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each engine; default: 0")
    parser.add_argument("--tpus", type=int, default=0, help="TPUs of each engine; default: 0")
    parser.add_argument("--batch", type=int, default=512, help="rows that an engine gets at a time; default: 512")
    parser.add_argument("--max-tokens", type=int, default=128, help="default: 128")
    args = parser.parse_args()
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=args.progress)
    devices: dict[str, Any] = {"num_cpus": 0}  # so that a small machine has CPUs left for reading and writing
    if args.gpus:
        devices["num_gpus"] = args.gpus
    elif args.tpus:
        devices["resources"] = {"TPU": args.tpus}
    rows = ray.data.read_parquet(args.prompts)
    rows = rows.repartition(target_num_rows_per_block=args.batch)  # a block is written when all its rows are done
    rows = rows.map_batches(
        Generate,
        fn_constructor_args=(args.model, max(1, args.gpus, args.tpus), args.max_tokens),
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        batch_size=args.batch,
        **devices,
    )
    rows.write_parquet(args.answers, mode=ray.data.SaveMode.APPEND)


if __name__ == "__main__":
    main()
