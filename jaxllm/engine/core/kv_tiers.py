"""The host's blocks at start-up: their number, the facts that their content depends on, and what moves them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.programs.cache import code_digest, cpu_digest
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.tiers.folder import BlockFolder
from jaxllm.execution.tiers.host_pool import HostPool
from jaxllm.execution.tiers.move_shape import MOVED_BLOCKS, move_shapes
from jaxllm.execution.tiers.mover import Mover
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.scheduling.config import SchedulerConfig


def num_host_blocks(size_gib: float | None, compiler: StepCompiler, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks of each holder that the host keeps: as many for each one of the device's, in all groups."""
    if size_gib is None:
        return ()
    layout = compiler.config.kv_layout
    counts = [*layout.num_blocks(num_blocks), *([layout.num_slots] if layout.states else [])]
    block_bytes = [HostPool.block_bytes(specs) for specs in _block_specs(compiler, num_blocks)]
    total = sum(count * size for count, size in zip(counts, block_bytes, strict=True))
    return tuple(max(1, int(size_gib * 2**30 * count // max(1, total))) for count in counts)


def root_hash(config: EngineConfig, compiler: StepCompiler) -> bytes | None:
    """Return a digest of all that the content of a block depends on besides its tokens; None if there is no folder.

    It covers the weights, as far as the names, sizes and times of their files tell, the settings of steps, the code,
    the devices and the libraries. An engine with others finds nothing of this one.
    """
    args = config.args
    if args.kv_cache_folder is None:
        return None
    device = config.mesh.devices.flat[0]
    facts = (
        *(config.checkpoint.stamp(), args.load_format, args.seed, args.mm_processor_kwargs, config.max_model_len),
        *(compiler.config, compiler.options, compiler.model.facts),
        *(code_digest(), jax.__version__, device.client.platform_version, device.device_kind, config.mesh.shape),
        cpu_digest() if config.platform == "cpu" else None,
    )
    return hashlib.sha256("\n".join(map(str, facts)).encode()).digest()


def make_mover(
    config: EngineConfig, compiler: StepCompiler, runner: ModelRunner, num_blocks: int, scheduler: SchedulerConfig
) -> Mover | None:
    """Return what moves blocks to the host and back; None if the host keeps none.

    Raises VLLMValidationError for a folder that cannot be used.
    """
    if not scheduler.num_host_blocks:
        return None
    pools = list(map(HostPool, _block_specs(compiler, num_blocks), scheduler.num_host_blocks))
    folder, root, files = config.args.kv_cache_folder, scheduler.root_hash, None
    if folder is not None and root is not None:
        try:
            files = BlockFolder(Path(folder), root.hex()[:32], int(config.args.kv_cache_folder_size * 2**30))
        except OSError as error:
            message = f"kv_cache_folder={folder!r} cannot be used: {error}."
            raise VLLMValidationError(message, parameter="kv_cache_folder", value=folder) from error
    stamp = None if files is None else config.checkpoint.stamp()
    return Mover(runner.launcher, pools, files, lambda: _stamp(config) == stamp)


def _stamp(config: EngineConfig) -> str | None:
    """Return the stamp of the weights' files; None if they are gone."""
    try:
        return config.checkpoint.stamp()
    except OSError:
        return None


def _block_specs(compiler: StepCompiler, num_blocks: int) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the form in which blocks of each holder are moved."""
    holders = sorted({shape.holder for shape in move_shapes(compiler.config)})
    return [compiler.caches.block_specs(num_blocks, holder, MOVED_BLOCKS) for holder in holders]
