"""Run tiny checkpoints of model families in float32 on the default device, and compare their outputs with HF's goldens.

tests/e2e/test_families.py does the same on a CPU. A device without a kernel for float32 runs plain XLA: then the models
and XLA's programs are checked.
"""

from __future__ import annotations

import sys
from typing import Any

from lib.evidence import Evidence, make_parser
from lib.machine import describe_device

from jaxllm import LLM
from tests.e2e.test_families import TOLERANCE, generate
from tests.models.tiny import BLOCK_SIZE, CASES, Golden, folder, read_goldens

VARIED = ("gpt_oss", "mistral4", "qwen3_moe", "qwen3_next", "nemotron_h")
"""Families with windows, sinks, latents, experts and recurrent states; each takes some 20 seconds to compile."""
type Row = dict[str, Any]


def main() -> int:
    """Generate, compare, and write a row for each checkpoint."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=VARIED, metavar="CASE")
    args = parser.parse_args()
    # An engine says how much of a GPU's memory JAX is to take, before JAX looks at it.
    rows = [check(case) for case in args.cases[: 1 if args.dry_run else None]]
    evidence = Evidence(args.json, describe_device() | {"dtype": "float32"})
    for row in rows:
        evidence.add(row)
    return evidence.finish()


def check(case: str) -> Row:
    """Return the number of tokens that equal HF's, the largest error of their log-probabilities, and what is wrong."""
    goldens = read_goldens(case)
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 8, "max_num_seqs": 8}
    settings |= {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "max_logprobs": -1, "enforce_eager": True}
    with LLM(str(folder(case)), dtype="float32", **settings) as llm:
        outputs = generate(llm, goldens)
        attention = llm.llm_engine.vllm_config.attention_config.backend
    compared = [compare(output, golden) for output, golden in zip(outputs, goldens, strict=True)]
    same, error = [tokens for tokens, _ in compared], max(error for _, error in compared)
    missed = [] if same == [len(golden.tokens) for golden in goldens] else ["tokens differ"]
    missed += [] if error <= TOLERANCE else [f"error {error:.1e}, allowed {TOLERANCE:.0e}"]
    return {"case": case, "attention": attention, "same": same, "error": round(error, 6), "missed": missed}


def compare(output: Any, golden: Golden) -> tuple[int, float]:
    """Return the number of tokens before the first difference, and the largest error of their log-probabilities."""
    completion = output.outputs[0]
    pairs = zip(completion.token_ids, golden.tokens.tolist(), strict=True)
    same = next((step for step, (ours, theirs) in enumerate(pairs) if ours != theirs), len(golden.tokens))
    errors = (
        abs(logprobs[token].logprob - float(expected))
        for logprobs, row in zip(completion.logprobs[: same + 1], golden.logprobs, strict=False)
        for token, expected in enumerate(row)
    )
    return same, max(errors)


if __name__ == "__main__":
    sys.exit(main())
