"""The implementations of every op: the platform each runs on, and its functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from .targets import ampere_refusal, hopper_refusal


class Implementation(NamedTuple):
    """One way to run an op.

    Functions are named "module:function", with the module's name below `pallas_kernels`, and imported when they are
    first used, so that kernels of other platforms cost nothing.
    """

    platform: str | None
    """The platform where it runs, or None for all. A CPU runs kernels of other platforms in their interpreters."""
    function: str
    """The function that runs the op. It takes what the op's `__call__` takes, checked, and what the op adds, such as
    `interpret`."""
    refuses: str | None = None
    """A function of a shape that returns why the implementation cannot run it, or None if it can."""
    prepare: str | None = None
    """A function of a shape and a folder that compiles what XLA calls; see the ops' `prepare`."""
    pool_spec: str | None = None
    """A function of a shape, a number of layers and one of blocks or slots; see `PoolOp.pool_spec`."""
    tiles: str | None = None
    """A function of a shape that returns the `Tiles` of attention. None: `XLA_TILES`."""
    row_alignment: int = 1
    """The first row of a longer chunk, or of an expert, must be a multiple of this number."""
    fuses_rope: Callable[[Any], bool] = lambda _: False
    """A function of a shape that returns whether attention rotates q and k, and casts k and v to the pool's dtype.
    Otherwise it gets them rotated and cast."""
    takes_decodes_alone: bool = False
    """True if steps of decodes alone are faster without room for tiles, `AttentionBatch.without_tiles`."""
    takes_architecture: bool = False
    """True if `function` and `tiles` take the device's `architecture` too."""
    takes_cores: bool = False
    """True if `function` takes the number of the device's multiprocessors, `num_cores`, too."""
    device_refusal: Callable[[str | None], str | None] = lambda _: None
    """A function of a device's architecture that returns why the implementation does not run there, or None."""

    def refusal(self, shape: Any) -> str | None:
        """Return why it cannot run a shape, or None if it can."""
        reason = load(self.refuses)(shape) if self.refuses else None
        if reason is None and self.platform == "cpu":
            return load("native.compiling:refuse")()
        return reason


type Implementations = Mapping[str, Implementation]


def load(name: str) -> Callable[..., Any]:
    """Import a function by its name in a table of implementations."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"pallas_kernels.{module}"), function)


PAGED_ATTENTION: Implementations = {
    "xla": Implementation(
        None,
        "paged_attention.xla:xla_paged_attention",
        pool_spec="paged_attention.layout:split_pool_spec",
    ),
    "cpu": Implementation(
        "cpu",
        "paged_attention.cpu:cpu_paged_attention",
        refuses="paged_attention.cpu:cpu_refusal",
        prepare="paged_attention.cpu:cpu_prepare",
        pool_spec="paged_attention.layout:cpu_pool_spec",
        tiles="paged_attention.cpu:cpu_tiles",
        fuses_rope=lambda shape: shape.kv_dtype == shape.dtype,
    ),
    "tpu": Implementation(
        "tpu",
        "paged_attention.tpu:tpu_paged_attention",
        refuses="paged_attention.tpu.options:tpu_refusal",
        pool_spec="paged_attention.layout:fused_pool_spec",
        tiles="paged_attention.tpu.options:tpu_tiles",
        row_alignment=16,
        takes_architecture=True,
    ),
    "gpu": Implementation(
        "gpu",
        "paged_attention.gpu:gpu_paged_attention",
        refuses="paged_attention.gpu:gpu_refusal",
        pool_spec="paged_attention.layout:fused_pool_spec",
        tiles="paged_attention.gpu:gpu_tiles",
        row_alignment=16,
        fuses_rope=lambda _: True,
        takes_decodes_alone=True,
        takes_cores=True,
        device_refusal=hopper_refusal,
    ),
    "gpu_mma": Implementation(
        "gpu",
        "paged_attention.gpu_mma:gpu_mma_paged_attention",
        refuses="paged_attention.gpu_mma:gpu_mma_refusal",
        pool_spec="paged_attention.layout:fused_pool_spec",
        tiles="paged_attention.gpu_mma:gpu_mma_tiles",
        row_alignment=16,
        fuses_rope=lambda shape: shape.kv_dtype == shape.dtype,
        takes_decodes_alone=True,
        device_refusal=ampere_refusal,
    ),
}

LATENT_ATTENTION: Implementations = {
    "xla": Implementation(
        None,
        "latent_attention.xla:xla_latent_attention",
        pool_spec="latent_attention.layout:latent_pool_spec",
    ),
    "cpu": Implementation(
        "cpu",
        "latent_attention.cpu:cpu_latent_attention",
        refuses="latent_attention.cpu:cpu_refusal",
        prepare="latent_attention.cpu:cpu_prepare",
        pool_spec="latent_attention.layout:latent_pool_spec",
        tiles="latent_attention.cpu:cpu_tiles",
    ),
    "tpu": Implementation(
        "tpu",
        "latent_attention.tpu:tpu_latent_attention",
        refuses="latent_attention.tpu:tpu_refusal",
        pool_spec="latent_attention.layout:tpu_pool_spec",
        tiles="latent_attention.tpu:tpu_tiles",
        row_alignment=16,
        takes_architecture=True,
    ),
    "gpu": Implementation(
        "gpu",
        "latent_attention.gpu:gpu_latent_attention",
        refuses="latent_attention.gpu.sizes:refusal",
        pool_spec="latent_attention.layout:gpu_pool_spec",
        tiles="latent_attention.gpu.sizes:gpu_tiles",
        row_alignment=16,
        takes_decodes_alone=True,
        takes_cores=True,
        device_refusal=hopper_refusal,
    ),
}

INDEXER: Implementations = {
    "xla": Implementation(None, "indexer.xla:xla_indexer", pool_spec="indexer.layout:indexer_pool_spec"),
    "cpu": Implementation(
        "cpu",
        "indexer.cpu:cpu_indexer",
        refuses="indexer.cpu:cpu_refusal",
        prepare="indexer.cpu:cpu_prepare",
        pool_spec="indexer.layout:indexer_pool_spec",
        tiles="indexer.cpu:cpu_tiles",
    ),
    "tpu": Implementation(
        "tpu",
        "indexer.tpu:tpu_indexer",
        refuses="indexer.tpu:tpu_refusal",
        pool_spec="indexer.layout:tpu_pool_spec",
        tiles="indexer.tpu:tpu_tiles",
        row_alignment=16,
        takes_architecture=True,
    ),
    "gpu": Implementation(
        "gpu",
        "indexer.gpu:gpu_indexer",
        refuses="indexer.gpu.sizes:refusal",
        pool_spec="indexer.layout:indexer_pool_spec",
        tiles="indexer.gpu.sizes:gpu_tiles",
        row_alignment=16,
        takes_decodes_alone=True,
        takes_cores=True,
        device_refusal=hopper_refusal,
    ),
}

SEGMENT_ATTENTION: Implementations = {
    "xla": Implementation(None, "segment_attention.xla:xla_segment_attention"),
    "xla_counted": Implementation(None, "segment_attention.xla:xla_counted_segment_attention"),
    "cpu": Implementation(
        "cpu",
        "segment_attention.cpu:cpu_segment_attention",
        refuses="segment_attention.cpu:cpu_refusal",
        prepare="segment_attention.cpu:cpu_prepare",
    ),
    "tpu": Implementation("tpu", "segment_attention.tpu:tpu_segment_attention", "segment_attention.tpu:refusal"),
    "gpu": Implementation(
        "gpu",
        "segment_attention.gpu:gpu_segment_attention",
        "segment_attention.gpu:refusal",
        device_refusal=hopper_refusal,
    ),
}

RELATIVE_ATTENTION: Implementations = {"xla": Implementation(None, "relative_attention.xla:xla_relative_attention")}

# "cpu_int8" rounds x to 8 bits where `rounding_refusal` allows it, and is "cpu" elsewhere. "gpu_fp8" rounds x to float8
# for weights that are float8; it is plain XLA, which calls cuBLASLt on GPUs that `fp8_device_refusal` allows.
LINEAR: Implementations = {
    "xla": Implementation(None, "linear.xla:xla_linear"),
    "cpu": Implementation("cpu", "linear.cpu:cpu_linear", "linear.cpu:cpu_refusal", "linear.cpu:cpu_prepare"),
    "cpu_int8": Implementation(
        "cpu", "linear.cpu:cpu_int8_linear", "linear.cpu:cpu_refusal", "linear.cpu:cpu_int8_prepare"
    ),
    "tpu": Implementation("tpu", "linear.tpu:tpu_linear", "linear.tpu.sizes:refusal"),
    "gpu": Implementation(
        "gpu", "linear.gpu:gpu_linear", "linear.gpu.sizes:refusal", takes_cores=True, device_refusal=hopper_refusal
    ),
    "gpu_mma": Implementation(
        "gpu", "linear.gpu_mma:gpu_mma_linear", "linear.gpu_mma.sizes:refusal", device_refusal=ampere_refusal
    ),
    "gpu_fp8": Implementation(None, "linear.fp8:fp8_linear", "linear.fp8:refusal"),
}

LORA: Implementations = {
    "xla": Implementation(None, "lora.xla:xla_lora"),
    "cpu": Implementation("cpu", "lora.cpu:cpu_lora", "lora.cpu:cpu_refusal", "lora.cpu:cpu_prepare"),
}

GROUPED_MATMUL: Implementations = {
    "xla": Implementation(None, "grouped_matmul.xla:xla_grouped_matmul"),
    "cpu": Implementation(
        "cpu",
        "grouped_matmul.cpu:cpu_grouped_matmul",
        refuses="grouped_matmul.cpu:cpu_refusal",
        prepare="grouped_matmul.cpu:cpu_prepare",
        row_alignment=4,
    ),
    "tpu": Implementation(
        "tpu", "grouped_matmul.tpu:tpu_grouped_matmul", "grouped_matmul.tpu.sizes:refusal", row_alignment=16
    ),
    "gpu": Implementation(
        "gpu",
        "grouped_matmul.gpu:gpu_grouped_matmul",
        refuses="grouped_matmul.gpu.sizes:refusal",
        row_alignment=16,
        takes_cores=True,
        device_refusal=hopper_refusal,
    ),
}


def _recurrent(op: str, **pool_specs: str) -> Implementations:
    """Return the table of an op of recurrent state, such as `gated_delta`.

    Its functions are named after the platform, such as `tpu_gated_delta` and `tpu_refusal`. `pool_specs` names the
    pools that differ from plain XLA's.
    """
    folder, pool_spec = f"recurrent_state.{op}", f"recurrent_state.{op}.shape:pool_spec"
    table = {"xla": Implementation(None, f"{folder}.xla:xla_{op}", pool_spec=pool_spec)}
    for platform in ("cpu", "tpu", "gpu"):
        module = f"{folder}.{platform}"
        table[platform] = Implementation(
            platform,
            f"{module}:{platform}_{op}",
            refuses=f"{module}:{platform}_refusal",
            prepare=f"{module}:cpu_prepare" if platform == "cpu" else None,
            pool_spec=f"{module}:{pool_specs[platform]}" if platform in pool_specs else pool_spec,
            device_refusal=hopper_refusal if platform == "gpu" else lambda _: None,
        )
    return table


GATED_DELTA = _recurrent("gated_delta", cpu="cpu_pool_spec")
STATE_SPACE = _recurrent("state_space", cpu="cpu_pool_spec")
SELECTIVE_SCAN: Implementations = {
    "xla": Implementation(
        None,
        "recurrent_state.selective_scan.xla:xla_selective_scan",
        pool_spec="recurrent_state.selective_scan.shape:pool_spec",
    )
}
CAUSAL_CONV = _recurrent("causal_conv", tpu="tpu_pool_spec")


class _Choice(NamedTuple):
    """The implementation that runs an op on a device."""

    implementation: str
    interpret: bool
    reason: str | None
    """Why the platform's own kernels do not run the op; None if they do, or if the caller named an implementation."""


def default_for(
    implementations: Implementations, platform: str, architecture: str | None, shapes: Sequence[Any] = ()
) -> tuple[str, str | None]:
    """Return the platform's first implementation that runs all shapes on a device of the architecture.

    If none does, return plain XLA, and why: what the first one that runs on the device has against a shape, or why the
    last one does not run there; no reason if the platform has none.
    """
    device_reason = shape_reason = None
    for name, entry in implementations.items():
        if entry.platform != platform:
            continue
        device_reason = entry.device_refusal(architecture)
        if device_reason is None:
            reason = _refusal(entry, shapes)
            if reason is None:
                return name, None
            shape_reason = shape_reason or reason
    return "xla", shape_reason or device_reason


def choose(
    implementations: Implementations,
    shapes: Sequence[Any],
    platform: str,
    name: str | None,
    architecture: str | None,
    op: str,
) -> _Choice:
    """Choose one implementation for all shapes, as `paged_attention.pick` does; `op` is the op's name for people."""
    if name is None:
        implementation, reason = default_for(implementations, platform, architecture, shapes)
        return _Choice(implementation, False, reason)
    if name not in implementations:
        raise ValueError(f"{op}: there is no implementation {name!r}, only {', '.join(implementations)}")
    entry = implementations[name]
    is_elsewhere = entry.platform not in (None, platform)
    if is_elsewhere and platform != "cpu":
        raise ValueError(f"{op}: {name!r} does not run on a {platform}")
    reason = None if is_elsewhere else entry.device_refusal(architecture)
    reason = reason or _refusal(entry, shapes)
    if reason is not None:
        raise ValueError(f"{op}: {name!r} cannot run this model here: {reason}")
    return _Choice(name, is_elsewhere, None)


def _refusal(entry: Implementation, shapes: Sequence[Any]) -> str | None:
    """Return why an implementation cannot run all shapes, or None if it can."""
    return next(filter(None, map(entry.refusal, shapes)), None)
