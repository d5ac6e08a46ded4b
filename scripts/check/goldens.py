"""Run SmolLM2's real weights end to end in bfloat16, and compare the tokens with HF Transformers' in float32.

A prompt passes if, up to the first token that differs, each side's token is among the other's five most likely, as in
tests/e2e/test_smollm2.py. --dry-run runs two steps of the shortest prompt, in plain XLA: for the interpreters the model
is too large, and tests/e2e/test_kernels.py runs engines in them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fetch_models import MODELS, default_dir
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device

from jaxllm import LLM, RequestOutput
from tests.e2e.goldens import NUM_TOKENS, assert_top5_close, generate_rows, load_rows

GOLDEN = "smollm2-135m-instruct-q4_1"
type Row = dict[str, Any]


def main() -> int:
    """Generate, compare, and write a row for each prompt."""
    parser = make_parser(__doc__)
    parser.add_argument("--backend", help="attention's, if not the platform's own kernels")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--model", type=Path, default=default_dir() / MODELS["smollm2"].name, metavar="GGUF")
    args = parser.parse_args()
    rows = sorted(load_rows(GOLDEN), key=lambda row: len(row["prompt_ids"]))[: 1 if args.dry_run else None]
    backend = "xla" if args.dry_run else args.backend
    settings: dict[str, Any] = {"attention_config": {"backend": backend}} if backend else {}
    settings |= {"max_num_batched_tokens": 16, "max_num_seqs": 1} if args.dry_run else {}
    llm = LLM(str(args.model), dtype="bfloat16", enforce_eager=args.enforce_eager or bool(args.dry_run), **settings)
    implementation = llm.llm_engine.vllm_config.attention_config.backend
    evidence = Evidence(args.json, describe_device() | {"attention": implementation, "golden": GOLDEN})
    outputs = generate_rows(llm, rows, 2 if args.dry_run else NUM_TOKENS)
    for output, row in zip(outputs, rows, strict=True):
        evidence.add(compare(output, row))
    if not backend and implementation == "xla":
        evidence.add({"missed": ["these are not the platform's own kernels"]})
    return evidence.finish()


def compare(output: RequestOutput, row: Row) -> Row:
    """Return the number of tokens before the first difference, the first log-probability's error, and what is wrong."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, row["token_ids"], strict=False)
    same = next((step for step, (ours, theirs) in enumerate(pairs) if ours != theirs), len(completion.token_ids))
    first, best = completion.logprobs[0], row["top_ids"][0][0]
    error = abs(first[best].logprob - row["top_logprobs"][0][0]) if best in first else None
    missed = [] if output.prompt_token_ids == row["prompt_ids"] else ["the prompt's own tokens differ"]
    try:
        assert_top5_close([output], [row])
    except AssertionError as wrong:
        missed.append(str(wrong).splitlines()[0])
    return {"prompt_tokens": len(row["prompt_ids"]), "same": same, "first_error": error, "missed": missed}


if __name__ == "__main__":
    sys.exit(main())
