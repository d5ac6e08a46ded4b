"""Write the cost sheet of GPU kernels: the compilers' figures beside the limits of an H100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile import ptx
from jaxllm.resolve.hardware import HARDWARE

H100 = HARDWARE["h100"]
NUM_SMS = 132
MMA_FLOPS, SPECIAL_FUNCTIONS, ISSUES = 4096, 16, 4
"""What an SM does in a cycle: FLOPs of dense bfloat16 matmuls, special functions such as exp2, or instructions that it
starts, each for 32 threads."""
CLOCK = H100.flops_per_second / NUM_SMS / MMA_FLOPS
"""The frequency, in Hz, at which NVIDIA's peak is reached."""
SM_REGISTERS, SM_THREADS, SM_BLOCKS, SM_SMEM = 65536, 2048, 32, 228 * 1024
SHARED_TILES = ("paged_prefill", "latent_prefill", "segment_attention")
"""In these kernels several thread blocks read the same KV tile at about the same time: the query heads of a kv head,
and neighbouring query tiles."""
WITHOUT_TILES = ("latent_write", "gated_delta_decode", "state_space_decode", "causal_conv_decode")
"""Kernels without a loop over tiles."""
LIMITS = (
    f"{H100.bytes_per_second / 1e12:.2f} TB/s (HBM), {H100.flops_per_second / 1e12:.1f} TFLOP/s (MMA), "
    f"{NUM_SMS} x {SPECIAL_FUNCTIONS} special functions a cycle of {CLOCK / 1e9:.2f} GHz (exp)"
)
LEGEND = f"""
A tile is what an iteration of the main loop brings and computes with; kv_write has no loop: 8 tokens of a kv head.
ns is what a tile takes at one SM's share of {LIMITS}.
In prefill the L2 cache serves thread blocks that share a tile: fewer than `reuse` of them, and HBM is the bound.
ops_ns is what starting the instructions in the PTX of all computing warpgroups takes, in the longest way through a
tile (masked, and its last values cleared), {ISSUES} a cycle: ptxas makes fewer of them. Latencies are not counted.
Each kernel is compiled once, and stands where it is first needed.
"""


def occupancy(registers: int, threads: int, smem: int) -> dict[str, Any]:
    """Return a thread block's registers and shared memory, and the number of blocks on an SM; `smem` is in bytes."""
    # A warp gets registers by 256, and a block 1 KiB of shared memory besides its own.
    block_registers = threads // 32 * -(-registers * 32 // 256) * 256
    blocks = min(SM_BLOCKS, SM_THREADS // threads, SM_REGISTERS // block_registers, SM_SMEM // (smem + 1024))
    return {"registers": registers, "smem_KiB": round(smem / 1024, 1), "blocks_per_SM": blocks}


def cost(name: str, kernel: ptx.Kernel) -> dict[str, Any]:
    """Return the time of a tile at each limit of an SM, and which limit is the bound."""
    if name in WITHOUT_TILES:
        return {}
    brings = max(kernel.loops, key=lambda loop: loop.num_bytes)
    if not brings.num_bytes:
        raise ValueError(f"in {name}'s PTX nothing brings bytes")
    computes = max(kernel.loops, key=lambda loop: loop.flops)
    # Without matmuls, the loop that brings values also adds them up. Else one warpgroup brings tiles for the others.
    computes = computes if computes.flops else brings
    warpgroups = kernel.threads // ptx.WARPGROUP - (computes is not brings)
    flops, specials = warpgroups * computes.flops, warpgroups * computes.specials
    ns = {
        "HBM": 1e9 * brings.num_bytes / (H100.bytes_per_second / NUM_SMS),
        "MMA": 1e9 * flops / (MMA_FLOPS * CLOCK),
        "exp": 1e9 * specials / (SPECIAL_FUNCTIONS * CLOCK),
    }
    is_shared = name in SHARED_TILES
    instructions = warpgroups * computes.instructions * ptx.WARPGROUP / 32
    bound = max(("MMA", "exp") if is_shared else ns, key=lambda limit: ns[limit])
    figures = {
        "tile_KiB": round(brings.num_bytes / 1024, 1),
        "FLOP_per_byte": round(flops / brings.num_bytes),
        **{f"{limit}_ns": round(each) for limit, each in ns.items()},
        "ops_ns": round(1e9 * instructions / (ISSUES * CLOCK)),
        "bound": bound,
    }
    return figures | ({"reuse": round(ns["HBM"] / ns[bound], 1)} if is_shared else {})


def cost_sheet(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kernel of the rows, for block sizes that cost the same in one."""
    sheet: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        for name, figures in row.get("kernels", {}).items():
            line = {"case": row["case"], "kernel": name, "kv": row["kv"], "block": "", **figures}
            line = sheet.setdefault(tuple(line.values()), line)
            if (block := str(row["block"])) not in line["block"].split(","):
                line["block"] += f",{block}" if line["block"] else block
    return list(sheet.values())
