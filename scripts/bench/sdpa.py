"""Measure torch's scaled dot product attention at the sizes of scripts/bench.py kernels, in bfloat16.

K and V are contiguous, without block tables; decodes and prefills run in each of torch's backends that accepts them.
Times are the device's, by torch's profiler. --dry-run does the same at toy size on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from lib.evidence import Evidence, make_parser
from lib.torch_device import busy_seconds, describe_torch, missing

HEADS = {"llama-3-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64)}
"""Query heads, kv heads and the width of a head."""
DECODES = ((64, 2048), (1, 8192), (32, 2048), (64, 8192))
PREFILLS = (4096, 8192, 16_384)
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("kind", choices=("decode", "prefill"))
    args = parser.parse_args()
    if reason := missing("torch"):
        return Evidence(args.json, {}).skip(reason)
    evidence = Evidence(args.json, describe_torch())
    sizes = [(num_seqs, context, 1) for num_seqs, context in DECODES]
    if args.kind == "prefill":
        sizes = [(1, length, length) for length in PREFILLS]
    if args.dry_run:
        sizes = [(2, 40, 1 if args.kind == "decode" else 40)]
    for model in list(HEADS)[: 1 if args.dry_run else None]:
        for size in sizes:
            for row in measure(model, *size, is_dry=bool(args.dry_run)):
                evidence.add({"kind": args.kind, "model": model} | row)
    return evidence.finish()


def measure(model: str, num_seqs: int, context: int, chunk: int, *, is_dry: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each backend that takes the size; its output is compared with float32's."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    num_heads, num_kv_heads, head_dim = HEADS[model]
    device = "cpu" if is_dry else "cuda"
    make = lambda heads, rows: torch.randn(num_seqs, heads, rows, head_dim, dtype=torch.bfloat16, device=device)  # noqa: E731
    q, k, v = make(num_heads, chunk), make(num_kv_heads, context), make(num_kv_heads, context)
    call = lambda: scaled_dot_product_attention(q, k, v, is_causal=chunk > 1, enable_gqa=True)  # noqa: E731
    for backend in ("MATH",) if is_dry else BACKENDS:
        row: dict[str, Any] = {"seqs": num_seqs, "context": context, "backend": backend}
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                seconds = busy_seconds(call, 1 if is_dry else 10)
                error = error_of(call(), q, k, v)
        except RuntimeError as refusal:
            yield row | {"refused": str(refusal).splitlines()[0]}
            continue
        num_bytes = (k.numel() + v.numel()) * 2
        flops = 4 * num_seqs * num_heads * head_dim * chunk * (chunk + 1) / 2
        rate = {"gb_per_s": num_bytes / seconds / 1e9} if chunk == 1 else {"tflop_per_s": flops / seconds / 1e12}
        yield row | {"us": round(seconds * 1e6, 1), "error": error} | rate


def error_of(out: Any, q: Any, k: Any, v: Any) -> float:
    """Return the error of the first sequence's last row against float32, relative to its root mean square."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x[0].float().repeat_interleave(group, 0) for x in (k, v))
    scores = q[0, :, -1:].float() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    expected = (torch.softmax(scores, -1) @ v)[:, 0]
    size = lambda x: x.pow(2).mean(-1).sqrt()  # noqa: E731
    return round(float((size(out[0, :, -1].float() - expected) / size(expected)).max()), 5)


if __name__ == "__main__":
    sys.exit(main())
