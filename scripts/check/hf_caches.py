"""Compare HF's cached runs with its whole ones for tiny checkpoints, in float32 and float64, and with their goldens.

Needs an environment with torch and transformers 5.23 (`scripts/peers.sh DIR hf`). Goldens come from cached runs, and HF
computes whole prompts in another way: delta rules go by chunks, and rounding may change which tokens an indexer
chooses. So the differences are how far the oracle is from itself. HF computes parts in float32 at any dtype, which is
why float64 does not make them vanish.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lib import results
from lib.evidence import Evidence
from make.tiny_checkpoints import PROMPT_LENS, decode, whole

TINY = Path(__file__).resolve().parents[2] / "tests" / "data" / "tiny"
CASES = ("deepseek_v32", "glm_moe_dsa", "dots3_note", "mistral_large4", "kimi_linear", "bailing_hybrid")
LIMIT = 1e-4
"""The most that log-probabilities may differ: the tolerance of tests that compare with goldens."""
DTYPES = (torch.float32, torch.float64)


def main() -> int:
    """Compare, and write a row for each checkpoint and dtype."""
    parser = results.make_parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of tests/data/tiny; by default {', '.join(CASES)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    evidence = Evidence(args.json, {"transformers": transformers.__version__, "torch": torch.__version__})
    for case in args.cases or CASES:
        for dtype in DTYPES:
            evidence.add(compare(case, dtype))
    return evidence.finish()


def compare(case: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the largest differences between log-probabilities over all prompts and decodes, and what is wrong."""
    of_whole, of_golden, missed = [], [], []
    with np.load(TINY / case / "golden.npz") as golden:
        for index, length in enumerate(PROMPT_LENS):
            model, prompt = load(case, dtype), golden[f"prompt_{index}"].astype(np.int64)
            _, cached, tokens = decode(model, prompt)
            at_once = whole(model, np.concatenate((prompt, tokens[:-1].astype(np.int64))))[length - 1 :]
            of_whole.append(np.abs(at_once - cached).max())
            of_golden.append(np.abs(golden[f"logprobs_{index}"] - cached).max())
            if not np.array_equal(tokens, golden[f"tokens_{index}"]):
                missed.append(f"other tokens than the golden's after {length}")
    row: dict[str, Any] = {"case": case, "dtype": str(dtype).removeprefix("torch.")}
    row |= {"whole": float(max(of_whole)), "golden": float(max(of_golden))}
    missed += [name for name in ("whole", "golden") if not row[name] <= LIMIT]
    return row | {"missed": missed}


def load(case: str, dtype: torch.dtype) -> torch.nn.Module:
    """Load a checkpoint with experts one by one: torch has no grouped matmul in float64."""
    folder = TINY / case
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype, **plain).eval()


if __name__ == "__main__":
    sys.exit(main())
