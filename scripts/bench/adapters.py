"""Measure what LoRA adapters add to decode steps: an engine with them and one without, dummy weights of real shapes.

    scripts/bench.py adapters smollm2-135m [--rows 1 8 64] [--adapters 0 1 8] [--rank 16] [--json OUT]

Both engines decode the same number of rows and take their steps in turns, so that other load on the machine hits both.
Figures are medians, in milliseconds; `times` is the median of the ratios of neighbouring steps. Rows take the adapters
in turns, and with more adapters than rows some have no row.
"""

from __future__ import annotations

import json
import tempfile
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from lib.machine import describe_sources
from lib.results import make_parser, save
from lib.shapes import MODELS
from safetensors.numpy import save_file

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.lora.request import LoRARequest

PROMPT, WARM = 16, 4
"""Tokens of each prompt, and steps before those that are timed."""
_tags = count()


def main() -> None:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 8], help="how many are in a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each engine")
    args = parser.parse_args()
    report: dict[str, Any] = describe_sources() | {"model": args.model, "rank": args.rank, "steps": args.steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODELS[args.model]))
        adapters = [make_adapter(folder, MODELS[args.model], i, args.rank) for i in range(1, max(args.adapters) + 1)]
        base, adapted = make_engines(folder, args.rows, args.rank, max(1, len(adapters)))
        report["results"] = []
        for rows in args.rows:
            for number in args.adapters:
                row = compare(base, adapted, rows, adapters[:number], args.steps)
                print(json.dumps(row), flush=True)
                report["results"].append(row)
    save(args.json, report)


def make_engines(folder: Path, rows: list[int], rank: int, num_adapters: int) -> tuple[LLM, LLM]:
    """Return an engine without adapters and one with room for some."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    settings |= {"max_num_seqs": max(rows), "max_model_len": 256, "max_num_batched_tokens": 512}
    settings |= {"enforce_eager": True, "cudagraph_capture_sizes": sorted(rows), "enable_prefix_caching": False}
    settings |= {"num_gpu_blocks_override": 4 * max(rows) + 1, "disable_log_stats": True}
    places: dict[str, Any] = {"max_loras": num_adapters, "max_lora_rank": rank, "max_cpu_loras": num_adapters}
    return LLM(str(folder), **settings), LLM(str(folder), enable_lora=True, **places, **settings)


def make_adapter(folder: Path, hf: dict[str, Any], number: int, rank: int) -> LoRARequest:
    """Write a random adapter for all linear layers of a Llama."""
    rng, path = np.random.default_rng(number), folder / f"adapter-{number}"
    path.mkdir()
    d, f, h = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    q, kv = hf["num_attention_heads"] * h, hf["num_key_value_heads"] * h
    sizes = {"self_attn.q_proj": (d, q), "self_attn.k_proj": (d, kv), "self_attn.v_proj": (d, kv)}
    sizes |= {"self_attn.o_proj": (q, d), "mlp.gate_proj": (d, f), "mlp.up_proj": (d, f), "mlp.down_proj": (f, d)}
    tensors = {}
    for layer in range(hf["num_hidden_layers"]):
        for module, (num_inputs, num_outputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, num_inputs), np.float32) / 100
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((num_outputs, rank), np.float32) / 100
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return LoRARequest(path.name, number, str(path))


def compare(base: LLM, adapted: LLM, rows: int, adapters: list[LoRARequest], steps: int) -> dict[str, Any]:
    """Time steps of both engines in turns."""
    begun = [(base, begin(base, rows, [], steps)), (adapted, begin(adapted, rows, adapters, steps))]
    pairs = [(step_ms(base), step_ms(adapted)) for _ in range(steps)]
    for llm, names in begun:
        llm.llm_engine.abort_request(names)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    medians = [median(each) for each in zip(*pairs, strict=True)]
    return {
        "rows": rows,
        "adapters": len(adapters),
        "base_ms": round(medians[0], 2),
        "adapted_ms": round(medians[1], 2),
        "times": round(median(own / plain for plain, own in pairs), 3),
    }


def begin(llm: LLM, rows: int, adapters: list[LoRARequest], steps: int) -> list[str]:
    """Add requests, run steps until all rows decode, and return the requests' names."""
    engine, tag = llm.llm_engine, next(_tags)
    ending: dict[str, Any] = {"max_tokens": steps + rows + 4 * WARM, "ignore_eos": True, "detokenize": False}
    names = [f"{tag}-{row}" for row in range(rows)]
    for row, name in enumerate(names):
        prompt = TokensPrompt(prompt_token_ids=[(7 * i + 13 * row) % 1000 + 3 for i in range(PROMPT)])
        adapter = adapters[row % len(adapters)] if adapters else None
        engine.add_request(name, prompt, SamplingParams(temperature=0, **ending), lora_request=adapter)
    decoding: set[str] = set()
    while len(decoding) < rows:
        decoding |= {output.request_id for output in engine.step()}
    for _ in range(WARM):
        engine.step()
    return names


def step_ms(llm: LLM) -> float:
    """Return the milliseconds of one step of an engine."""
    start = perf_counter()
    llm.llm_engine.step()
    return (perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
