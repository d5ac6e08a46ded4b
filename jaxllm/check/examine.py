"""Make the report of `jaxllm check` from engine arguments and a topology, in the process that compiles."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax.errors import JaxRuntimeError

from jaxllm.check import compilers
from jaxllm.check.bounds import count_work
from jaxllm.check.fitting import Fit, find_changes, fit, out_of_memory
from jaxllm.check.hlo import count_collectives
from jaxllm.check.media import encoder_programs, report_media
from jaxllm.check.report import (
    ENCODE_CLIP,
    Bound,
    Change,
    Concurrency,
    Figures,
    GroupReport,
    MemoryReport,
    Program,
    Report,
)
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.encoders.clips import ClipShape
from jaxllm.execution.encoders.patches import EncoderShape
from jaxllm.execution.mesh import param_bytes, replicated_params
from jaxllm.execution.packing import pick_bucket
from jaxllm.execution.pooled_step import PoolShape
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import describe
from jaxllm.execution.step import StepShape
from jaxllm.loading.open import open_config
from jaxllm.resolve.checkpoint_settings import checkpoint_quantization
from jaxllm.resolve.hardware import Hardware, find_topology
from jaxllm.resolve.kv_cache_size import step_config
from jaxllm.resolve.media_settings import takes_images
from jaxllm.resolve.resolve_ops import detect_architecture
from jaxllm.sampling.inputs import Sampling
from jaxllm.version import __version__
from pallas_kernels.indexer import Indexer

if TYPE_CHECKING:
    from jaxllm.resolve.engine_args import EngineArgs
    from jaxllm.resolve.engine_config import EngineConfig

logger = logging.getLogger(__name__)

TELL_SECONDS = 10.0
LENGTHS = (1024, 4096, 16_384, 65_536)
"""The lengths of requests for which the report has the number that run at once, besides the whole context."""
_TEXT_LENGTHS = (32, 128, 512, 2048, 8192)
"""The lengths of texts for which the report has the number that pool in one step, besides the longest text."""


type ProgramShape = StepShape | PoolShape | EncoderShape | ClipShape


def examine(args: EngineArgs, topology: str) -> Report:
    """Size the engine on the topology's devices and compile its steps.

    Raises VLLMValidationError for an engine that cannot run there, and JAX's error for a program that does not compile.
    """
    hardware, num_devices = find_topology(topology)
    count = args.data_parallel_size
    if count > 1 and count * args.tensor_parallel_size > num_devices:
        message = (
            f"{topology} has {num_devices} devices, too few for {count} replicas of {args.tensor_parallel_size} each."
        )
        raise VLLMValidationError(message, parameter="data_parallel_size", value=count)
    where = {"revision": args.revision, "token": args.hf_token, "download_dir": args.download_dir}
    checkpoint = open_config(args.model, **where, sees=takes_images(args))
    devices = compilers.describe_devices(hardware, topology, num_devices)
    with _telling(f"the largest step for {topology}"):
        sized = fit(args, checkpoint, hardware, devices)
    programs, reason = _compile_steps(sized) if sized.reason is None else ([], sized.reason)
    changes = []
    if sized.reason is not None:
        with _telling("what would fit"):
            changes = find_changes(args, sized, checkpoint, hardware, topology)
    concurrency = [] if reason else list(_concurrency(sized))
    config = sized.config
    return Report(
        model=args.model,
        architecture=config.model_config.architecture,
        topology=topology,
        num_devices=num_devices,
        tensor_parallel_size=config.mesh.size,
        versions={"jaxllm": __version__} | compilers.compiler_versions(hardware),
        hardware=_figures(hardware),
        engine=_engine_settings(sized),
        fits=reason is None,
        reason=reason,
        memory=_memory(sized, hardware),
        media=report_media(sized),
        concurrency=concurrency,
        programs=programs,
        bounds=list(_bounds(sized, hardware, concurrency)),
        changes=changes,
        notes=[*_replica_notes(count), *_notes(config, hardware, changes)],
    )


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Log `what` when a block starts, and the time so far every TELL_SECONDS: it may take minutes."""
    logger.info("compiling %s", what)
    has_ended, started = threading.Event(), time.monotonic()

    def tell() -> None:
        while not has_ended.wait(TELL_SECONDS):
            logger.info("still compiling %s, for %.0f s", what, time.monotonic() - started)

    teller = threading.Thread(target=tell, name="jaxllm-check", daemon=True)
    teller.start()
    try:
        yield
    finally:
        has_ended.set()
        teller.join()


def _compile_steps(sized: Fit) -> tuple[list[Program], str | None]:
    """Compile the steps with all KV blocks; return them, and why they do not fit if the compiler fails."""
    programs: list[Program] = []
    for compiler, name, shape in _steps(sized):
        try:
            with _telling(f"{name} ({describe(shape)}) with {sized.num_blocks} KV blocks"):
                programs.append(_compile_step(compiler, name, shape, sized.num_blocks))
        except JaxRuntimeError as error:
            return programs, out_of_memory(error)
    return programs, None


def _steps(sized: Fit) -> Iterator[tuple[StepCompiler, str, ProgramShape]]:
    """Yield the programs of most interest with the names of their steps: the model's, and its draft model's."""
    config = sized.config
    compiler = StepCompiler(sized.size.steps, sized.model, config.mesh)
    for name, shape in (_shapes(compiler) | encoder_programs(sized, compiler)).items():
        yield compiler, name, shape
    for shape in compiler.shapes.clip_shapes:
        yield compiler, ENCODE_CLIP, shape
    if config.draft is not None and sized.draft is not None:
        compiler = StepCompiler(step_config(config.draft), sized.draft, config.mesh)
        yield compiler, "guess", _shapes(compiler)["decode"]


def _shapes(compiler: StepCompiler) -> dict[str, StepShape | PoolShape]:
    """Return the programs of most interest by the names of their steps."""
    config, largest = compiler.config, compiler.shapes.buckets[-1]
    shapes: dict[str, StepShape | PoolShape] = {}
    if config.generates:
        decode = pick_bucket(compiler.shapes.buckets, config.max_num_seqs, config.max_num_seqs)
        shapes["decode"] = compiler.shapes.step_shape(decode, Sampling.PLAIN, has_chunks=False)
        shapes["prefill"] = compiler.shapes.step_shape(largest, Sampling.PLAIN)
        shapes["prefill, every sampling feature"] = compiler.shapes.step_shape(largest, Sampling.FULL)
    if config.pools_sequences:
        shapes["pool"] = compiler.shapes.pool_shape(largest, by_token=False)
    if config.pools_tokens:
        shapes["pool by token"] = compiler.shapes.pool_shape(largest, by_token=True)
    return shapes


def _compile_step(compiler: StepCompiler, name: str, shape: ProgramShape, num_blocks: int) -> Program:
    started = time.monotonic()
    compiled = compiler.compile(shape, num_blocks)
    seconds, memory = time.monotonic() - started, compiled.memory_analysis()
    match shape:
        case EncoderShape(num_tokens) | ClipShape(num_tokens):
            num_seqs = 0
        case _:
            num_tokens, num_seqs = shape.batch.bucket
    return Program(
        name=name,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        scratch_bytes=memory.temp_size_in_bytes if memory else 0,
        code_bytes=memory.generated_code_size_in_bytes if memory else 0,
        compile_seconds=round(seconds, 1),
        collectives=count_collectives(compiled.as_text() or ""),
    )


def _concurrency(sized: Fit) -> Iterator[Concurrency]:
    """Yield the number of requests that fit in the pool, or of texts in a step; the null block holds no tokens."""
    config, steps = sized.config, sized.size.steps
    layout = steps.kv_layout
    sizes = layout.num_blocks(sized.num_blocks)
    groups = [group.config(size) for group, size in zip(layout.groups, sizes, strict=True)]
    lengths = LENGTHS if config.generates else _TEXT_LENGTHS
    for length in (*(each for each in lengths if each < config.max_model_len), config.max_model_len):
        new = 1 if config.generates else min(length, config.max_num_batched_tokens)
        most = [config.max_num_seqs]
        if not config.generates:
            rows = -(-length // steps.row_alignment) * steps.row_alignment
            most.append(max(1, config.max_num_batched_tokens // rows))  # a longer one takes several steps
        held = [(group.num_blocks - 1) // group.most_blocks(length, new, config.block_size) for group in groups]
        if layout.cross_groups:
            held.append((layout.num_cross_blocks(sized.num_blocks) - 1) // layout.clip_blocks)
        yield Concurrency(length=length, requests=min(*most, *held))


def _bounds(sized: Fit, hardware: Hardware, concurrency: list[Concurrency]) -> Iterator[Bound]:
    config, memory = sized.config, sized.size.memory
    if memory is None:
        return
    work = count_work(
        config.model_config,
        sized.step_specs,
        config.mesh,
        kv_itemsize=config.kv_groups[0].attention.shape.kv_dtype.itemsize,
        max_num_batched_tokens=config.max_num_batched_tokens,
        bytes_per_second=hardware.bytes_per_second,
        flops_per_second=hardware.flops_per_second,
        generates=config.generates,
    )
    for load in concurrency:
        for batch in sorted({1, load.requests}):
            yield work.decode(batch, load.length) if config.generates else work.pool(batch, load.length)
    for load in concurrency if config.generates else ():
        yield work.prefill(load.length)


def _memory(sized: Fit, hardware: Hardware) -> MemoryReport:
    config, memory = sized.config, sized.size.memory
    limit = hardware.memory_limit(config.args.gpu_memory_utilization)
    replicated = [] if config.mesh.size == 1 else replicated_params(config.mesh, sized.step_specs)
    params = param_bytes(config.mesh, sized.specs)
    layout = sized.size.steps.kv_layout
    sizes = layout.num_blocks(sized.num_blocks) if sized.num_blocks else ()
    return MemoryReport(
        limit=limit,
        params=params,
        scratch=memory.scratch if memory and params <= limit else None,
        num_blocks=sized.num_blocks,
        kv_cache=layout.bytes(sized.num_blocks) if sized.num_blocks else 0,
        groups=[
            GroupReport(
                num_layers=group.num_layers,
                window=group.window,
                attention_chunk=group.attention_chunk,
                num_blocks=size,
                block=group.block_bytes,
                causal=group.causal,
                is_indexer=isinstance(group.attention, Indexer),
            )
            for group, size in zip(layout.groups, sizes, strict=False)
            if group.num_layers
        ]
        + [
            GroupReport(
                num_layers=group.num_layers,
                window=None,
                attention_chunk=None,
                num_blocks=layout.num_cross_blocks(sized.num_blocks) if sized.num_blocks else 0,
                block=group.block_bytes,
                num_frames=layout.num_frames,
            )
            for group in layout.cross_groups
        ],
        state_slots=layout.num_slots,
        state_slot=sum(group.slot_bytes for group in layout.states),
        replicated_params=replicated,
        draft_params=memory.params - params if memory else 0,
        draft_block=layout.draft_block_bytes,
    )


def _engine_settings(sized: Fit) -> dict[str, Any]:
    config, pooling = sized.config, sized.config.model_config.pooling
    of_pooling = {"runner": config.runner_type, "tasks": "/".join(pooling.tasks)} if pooling else {}
    return of_pooling | {
        "dtype": config.dtype,
        "quantization": config.quantization or checkpoint_quantization(config.checkpoint),
        "kv_cache_dtype": str(config.kv_groups[0].attention.shape.kv_dtype),
        "attention": config.attention_names,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "gpu_memory_utilization": config.args.gpu_memory_utilization,
    }


def _figures(hardware: Hardware) -> Figures:
    return Figures(
        device_kind=hardware.device_kind,
        memory_bytes=hardware.memory_bytes,
        usable_bytes=hardware.usable_bytes,
        bytes_per_second=hardware.bytes_per_second,
        flops_per_second=hardware.flops_per_second,
    )


def _replica_notes(count: int) -> list[str]:
    if count == 1:
        return []
    return [f"These are the figures of one of {count} replicas: together they hold {count} times as many requests."]


def _notes(config: EngineConfig, hardware: Hardware, changes: list[Change]) -> Iterator[str]:
    named = [config.mesh.size, *(change.settings.get("tensor_parallel_size", 1) for change in changes)]
    if (num_hosts := hardware.num_hosts(most := max(named))) > 1:
        yield f"{most} devices of {hardware.name} are on {num_hosts} hosts: run it on each, with --nnodes {num_hosts}."
    architecture = detect_architecture(list(config.mesh.devices.flat))
    for attention in [group.attention for group in (*config.kv_groups, *config.cross_groups)]:
        reason = attention.missing_kernels(config.platform, architecture)
        if attention.implementation == "xla" and reason is not None:
            yield f"attention runs in plain XLA, not in the {config.platform}'s own kernels: {reason}."
    for ops in [group.ops for group in config.state_groups]:
        for op, reason in ops.missing_kernels(config.platform, architecture).items():
            yield f"{op} runs in plain XLA, not in the {config.platform}'s own kernels: {reason}."
