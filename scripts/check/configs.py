"""Compare random configurations of each family with HF Transformers: log-probabilities in float32, through `LLM`.

    scripts/check.py configs --hf-python PATH [--families llama qwen3 ...] [--count 20] [--seed 0] [--json OUT]
    scripts/check.py configs --cases FOLDER    # those that are written already
    scripts/check.py configs --hf-python PATH --write tests/data/configs    # anew, those that CI compares with

PATH is the Python of an environment with torch and transformers (`scripts/peers.sh DIR hf`), in which
`scripts/make.py random_configs` draws the configurations and computes with random weights. jaxllm runs the prompt in
chunks, some tokens are decoded, and both are done again after a hit in the prefix cache; on a CPU with its own kernels.
A configuration that jaxllm refuses counts as neither right nor wrong, and its row has the reason.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.evidence import Evidence, make_parser
from lib.machine import ROOT, describe_device

from jaxllm.exceptions import VLLMValidationError
from tests.e2e.random_cases import largest_error, read_case

TOLERANCE = 1e-4
CHUNKS = (16, 8, 64)
"""The most tokens of a step."""


def main() -> int:
    """Write or find the cases, and compare each."""
    parser = make_parser(__doc__)
    parser.add_argument("--hf-python", metavar="PATH")
    parser.add_argument("--cases", type=Path, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the cases there, and compare nothing")
    parser.add_argument("--families", nargs="+", metavar="FAMILY")
    parser.add_argument("--count", type=int, default=1, help="configurations of each family; 20 before a release")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.cases is None) == (args.hf_python is None):
        parser.error("give --hf-python, which draws cases, or --cases")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.cases or args.write or Path(scratch)
        if args.hf_python is not None:
            draw(args, folder)
        if args.write is not None:
            return 0
        evidence = Evidence(args.json, describe_device() | {"seed": args.seed})
        for path in sorted(folder.glob("*.json")):
            if not args.families or path.stem.rpartition("-")[0] in args.families:
                evidence.add(check(path))
    return evidence.finish()


def draw(args: Any, folder: Path) -> None:
    """Let HF's Python write cases."""
    command = [args.hf_python, str(ROOT / "scripts/make.py"), "random_configs", str(folder)]
    command += ["--count", str(args.count), "--seed", str(args.seed)]
    command += ["--families", *args.families] if args.families else []
    subprocess.run(command, check=True)


def check(path: Path) -> dict[str, Any]:
    """Return the row of one case."""
    case, row = read_case(path), {"case": path.stem}
    with tempfile.TemporaryDirectory() as folder:
        try:
            error = largest_error(case, Path(folder), max_num_batched_tokens=CHUNKS[case.seed % len(CHUNKS)])
        except VLLMValidationError as refusal:
            return row | {"refused": str(refusal).replace(folder, "")}
        except Exception as failure:  # noqa: BLE001 (whatever it is, it is this row's)
            return row | {"missed": [f"{type(failure).__name__}: {failure}"]}
    missed = [] if error <= TOLERANCE else [f"error {error:.1e}, allowed {TOLERANCE:.0e}"]
    return row | {"error": f"{error:.1e}", "missed": missed}


if __name__ == "__main__":
    sys.exit(main())
