"""Compile the whole step of real models for hardware that is not there, and check what the compiler made of it.

For each model: the plain and the truncated decode step, the plain step of the largest bucket and the full one, or the
largest step of a pooling model, on one device or spread over several. Checked: the KV pool is updated in place; scratch
does not grow with the pool; the program holds no copy of weights or pool; devices exchange two sums a layer, three
where an MLP is beside experts, and little else for embedding and sampling; on a GPU no branch or loop waits for the
host, and the decode steps and the pooling step are one command buffer (CUDA graph); where graphs hold loops, as they do
except on Hopper, no loop or branch is outside of one, and a step of few rows writes no widened weights. With LoRA
adapters: no layer's adapters are copied or widened, and the program that writes an adapter into its slot does so in
place. Of models that see, plain steps scatter nothing, and their encoder's programs for a picture of 448 x 448 pixels
and for the largest one write the feature cache in place; on a GPU none of their kernels spills registers, by ptxas' own
account of XLA's and of Mosaic GPU's, and the host is asked nothing. The same holds for all programs of
encoder-decoders: the one for a clip writes the KV pool in place, and neither it nor those that align transcripts, for
the fewest tokens and for the most, hold scores of all frames with all frames.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
from jax.sharding import Mesh
from jax.stages import Compiled
from lib.results import save
from lib.shapes import GENERATION_CONFIGS, IMAGE_PROCESSORS, MODELS, with_layers

from compile.compiled_step import (
    count_loops,
    count_nodes,
    count_thunks,
    find_adapter_copies,
    find_copies,
    find_expert_copies,
    find_host_calls,
    find_host_predicates,
    find_scatters,
    read_thunks,
    shard_shape,
)
from compile.gpu_compiler import captured_output, read_ptxas
from compile.linear import made_arrays
from compile.start import compile_start
from compile.target import Target
from jaxllm.check.compilers import describe_devices
from jaxllm.check.hlo import count_collectives
from jaxllm.execution import kv_pool
from jaxllm.execution.encoders.alignment import AlignShape
from jaxllm.execution.encoders.clips import ClipShape
from jaxllm.execution.encoders.patches import EncoderShape
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.packing import pick_bucket
from jaxllm.execution.pooled_step import PoolShape
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import ProgramKey, Upkeep, describe
from jaxllm.execution.step import StepShape
from jaxllm.loading.open import open_config
from jaxllm.models import get_family
from jaxllm.models.adapters import AdapterShape
from jaxllm.models.model import Model
from jaxllm.models.params import MESH_AXES, array_specs
from jaxllm.models.shapes import linear_shapes
from jaxllm.models.towers.layout import count_slots
from jaxllm.models.towers.settings import Grid, TowerSettings
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.hardware import find_topology
from jaxllm.resolve.kv_cache_size import step_config
from jaxllm.resolve.model import make_model
from jaxllm.resolve.resolve_pooling import is_causal
from jaxllm.sampling.inputs import Sampling
from jaxllm.sampling.shards import VocabShards
from pallas_kernels.linear.gpu.sizes import WIDENED_ROWS
from pallas_kernels.linear.xla import SUMMED_ROWS

STEPS = ("decode", "decode truncated", "largest", "full")
SMALLEST = "smallest"
"""The plain step of the smallest bucket, which is only checked where it is named."""
POOLED = "pooled"
"""The only step of a pooling model: its largest."""
SET_ADAPTER = Upkeep.SET_ADAPTER.value
"""The program that writes an adapter into its slot."""
ENCODERS = ("encode picture", "encode largest")
"""The encoder's programs: for a picture of PICTURE x PICTURE pixels, and the largest."""
PICTURE = 448
CLIPS = ("encode clip", "align smallest", "align largest")
"""An encoder-decoder's programs beside its steps: for a clip, and to align the fewest and the most tokens."""
CLIP_SEQS = 32
"""The sequences of an encoder-decoder, each with the blocks of a clip."""
FRAME_TILE = 512
"""A kernel pads a clip's frames to a multiple of this many rows at most."""
# No power of two, so that no activation is as large as a weight.
SEQS, TOKENS, CONTEXT, BLOCK_SIZE = 64, 2000, 8192, 64
MEDIA_CONTEXT = 32_768
"""That of models that see: the largest picture of some takes 16,384 rows."""
# A smaller pool would fit into VMEM, and some of them are brought there.
BLOCKS = (1025, 2049)
FEWER_BLOCKS = (513, 1025)
"""The numbers of blocks for models beside whose weights a device does not hold the larger pool."""
ENCODER_BLOCKS = (2049, 4097)
"""The same for an encoder, whose pool is of one layer."""
SPARE_SLOTS = 1.25
"""The slots for snapshots in the second program of a model with recurrent states, as a part of its sequences."""
SLACK = 2**20  # bytes of scratch; a thousandth of the additional blocks
LAYER_NODES, NORM_NODES, LATENT_NODES, MOE_NODES, SHARED_NODES, OTHER_NODES = 12, 2, 3, 17, 4, 36
"""The most launches of a layer, more if it norms queries and keys, attends over latents, has experts or one that all
share, and of all the rest, in a plain decode step. Parts of weights, a matmul, a softmax and three sums choose the
experts, 7 launches group the rows, and with many such layers XLA computes in each anew what attention's kernels need of
a step, in 5 launches."""
TRUNCATION_NODES = 64
"""The most additional launches of a truncated step: three in each of the 16 rounds of its searches, and a few."""
QUANTIZED_NODES = 8
"""The most additional launches of a layer with quantized weights: its four matmuls order their rows and add up parts of
sums."""
BATCH_NODES = 16
"""The most additional launches of a layer whose experts are multiplied in plain XLA, in batches of tiles."""
ADAPTER_NODES = 4
"""The most additional launches of a weight with adapters: two matmuls, the launch between them, and a sum."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--layers", type=int, help="compile fewer layers")
    parser.add_argument("--quantized", action="store_true", help="weights in the checkpoint's format, not bfloat16")
    parser.add_argument(
        "--steps",
        nargs="+",
        choices=(*STEPS, SMALLEST, POOLED, SET_ADAPTER, *ENCODERS, *CLIPS),
        help="check only these",
    )
    parser.add_argument("--adapters", type=int, nargs=2, metavar=("SLOTS", "RANK"), help="room for LoRA adapters")
    parser.add_argument("--start", action="store_true", help="compile an engine's programs in its order, check nothing")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="whole experts on each device")


def main(args: argparse.Namespace, target: Target) -> int:
    mesh = find_mesh(target, args.tensor_parallel_size)
    usable_bytes = target.hardware.usable_bytes
    check = compile_start if args.start else partial(check_model, steps=args.steps, usable_bytes=usable_bytes)
    make, rows = partial(make_compiler, mesh=mesh, num_layers=args.layers, is_quantized=args.quantized), []
    make = partial(make, deals_experts=args.enable_expert_parallel)
    if args.adapters is not None:
        make = partial(make, adapters=AdapterShape(*args.adapters))
    for row in ({"model": model} | row for model in args.models for row in check(make(model))):
        rows.append(row | {"target": target.name, "devices": mesh.size, "jax": jax.__version__})
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    save(args.json, rows)
    return int(any(row["missed"] for row in rows))


def find_mesh(target: Target, num_devices: int) -> Mesh:
    """Return the mesh of the target's first devices."""
    hardware, count = find_topology(target.name)
    devices = describe_devices(hardware, target.name, num_devices if target.is_gpu else count)
    if num_devices > len(devices):
        raise SystemExit(f"{target.name} has {len(devices)} devices, not {num_devices}")
    return make_mesh(devices[:num_devices])


def check_model(compiler: StepCompiler, *, steps: Sequence[str] | None, usable_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield a row per program: its figures, and its failed checks."""
    programs = find_programs(compiler)
    for title in steps or [title for title in programs if title != SMALLEST]:
        described = {"step": title, "attention": "+".join(attention_of(compiler))}
        if states := states_of(compiler):
            described["states"] = "+".join(states)
        if room := compiler.model.adapter_shape:
            described["adapters"] = f"{room.num_slots} of rank {room.rank}"
        program = programs[title]
        if isinstance(program, EncoderShape | ClipShape | AlignShape):
            figures = check_encoder(compiler, program)
        elif isinstance(program, Upkeep):
            figures = check_set_adapter(compiler)
        else:
            assert isinstance(program, StepShape | PoolShape)
            figures = check_program(compiler, program, usable_bytes)
        yield described | figures


def find_programs(compiler: StepCompiler) -> dict[str, ProgramKey]:
    """Return a model's programs by the names of their steps."""
    num_seqs = compiler.config.max_num_seqs
    decode, largest = pick_bucket(compiler.shapes.buckets, num_seqs, num_seqs), compiler.shapes.buckets[-1]
    upkeep: dict[str, ProgramKey] = {} if compiler.model.adapter_shape is None else {SET_ADAPTER: Upkeep.SET_ADAPTER}
    if not compiler.config.generates:
        return {POOLED: compiler.shapes.pool_shape(largest, by_token=False)} | upkeep
    steps: dict[str, ProgramKey] = {
        "decode": compiler.shapes.step_shape(decode, Sampling.PLAIN, has_chunks=False),
        "decode truncated": compiler.shapes.step_shape(decode, Sampling.TRUNCATED, has_chunks=False),
        "largest": compiler.shapes.step_shape(largest, Sampling.PLAIN),
        "full": compiler.shapes.step_shape(largest, Sampling.FULL),
        SMALLEST: compiler.shapes.step_shape(compiler.shapes.buckets[0], Sampling.PLAIN, has_chunks=False),
    }
    return steps | upkeep | encoders(compiler)


def encoders(compiler: StepCompiler) -> dict[str, ProgramKey]:
    """Return the programs of most interest that run an encoder of pictures or clips; none of a model without one."""
    if compiler.model.encoder is not None:
        aligns = compiler.shapes.align_shapes
        return dict(zip(CLIPS, (*compiler.shapes.clip_shapes, aligns[0], aligns[-1]), strict=True))
    if (with_part := compiler.model.find_tower("image")) is None:
        return {}
    part, tower = with_part
    shapes = compiler.shapes.encoder_shapes[part]
    num_slots = count_slots(tower.settings, [picture_grid(tower.settings)])
    picture = next(shape for shape in shapes if shape.num_slots >= num_slots)
    return dict(zip(ENCODERS, (picture, shapes[-1]), strict=True))


def picture_grid(settings: TowerSettings) -> Grid:
    """Return the patches of the picture, or of the only size that the tower takes."""
    if settings.positions == "exact":
        return Grid(1, settings.side, settings.side)
    return Grid(1, *(PICTURE // side // settings.merge * settings.merge for side in settings.patch_size))


def attention_of(compiler: StepCompiler) -> list[str]:
    """Return the implementations of attention; cache groups may have different ones."""
    groups = *compiler.config.groups, *compiler.config.cross_groups
    return list(dict.fromkeys(group.attention.implementation for group in groups))


def states_of(compiler: StepCompiler) -> list[str]:
    """Return the implementations of each group's ops of recurrent state: the convolution's, then the scan's."""
    return [name for group in compiler.config.states for name in group.ops.implementations]


def make_compiler(
    name: str,
    *,
    mesh: Mesh,
    num_layers: int | None,
    is_quantized: bool,
    deals_experts: bool = False,
    adapters: AdapterShape | None = None,
) -> StepCompiler:
    """Return the compiler of a model's steps as an engine has it; its weights are bfloat16 or the checkpoint's own."""
    hf = with_layers(MODELS[name], num_layers)
    if not is_quantized:
        hf = {key: value for key, value in hf.items() if key != "quantization_config"}
    config = get_family(hf["architectures"][0]).read_config(hf)
    context = min(CONTEXT if config.encoder is None else MEDIA_CONTEXT, config.max_position_embeddings)
    arguments = EngineArgs(
        model=name,
        dtype="bfloat16",
        tensor_parallel_size=mesh.size,
        enable_expert_parallel=deals_experts,
        max_num_seqs=SEQS if config.encoder is None or config.encoder.clips is None else CLIP_SEQS,
        # Texts go through an encoder in one step.
        max_num_batched_tokens=TOKENS if is_causal(config) else max(TOKENS, context + 8),
        max_model_len=context,
        block_size=BLOCK_SIZE,
        enable_lora=adapters is not None,
        max_loras=1 if adapters is None else adapters.num_slots,
        max_lora_rank=1 if adapters is None else adapters.rank,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf))
        if name in IMAGE_PROCESSORS:
            Path(folder, "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSORS[name]))
        if name in GENERATION_CONFIGS:
            # Fewer layers have not all heads.
            few = {} if num_layers is None else {"alignment_heads": None}
            Path(folder, "generation_config.json").write_text(json.dumps(GENERATION_CONFIGS[name] | few))
        engine = arguments.create_engine_config(devices=list(mesh.devices.flat), checkpoint=open_config(folder))
    return StepCompiler(step_config(engine), make_model(engine), engine.mesh)


def check_program(compiler: StepCompiler, shape: StepShape | PoolShape, usable_bytes: int) -> dict[str, Any]:
    """Compile with few blocks and with many, and for an encoder with as many as it has."""
    temps, missed, row = [], [], {}
    # The loops of plain XLA stay outside of command buffers.
    has_kernels = {*attention_of(compiler), *states_of(compiler)} in ({"gpu"}, {"gpu_mma"})
    # So do loops over chunks of recurrent states, which a step of decodes alone does not have.
    loops = bool(compiler.config.states) and not (isinstance(shape, StepShape) and shape.decodes_only)
    layout, blocks = compiler.config.kv_layout, pool_sizes(compiler, usable_bytes)
    is_step = isinstance(shape, StepShape)
    for num_blocks in blocks:
        # Recurrent states have more slots at last, too, where there are any.
        with patch.object(kv_pool, "SPARE_PART", SPARE_SLOTS if layout.states and temps else kv_pool.SPARE_PART):
            memory, hlo, listing, seconds, messages = compile_program(compiler, shape, num_blocks)
            pool_bytes = sum(map(device_bytes, jax.tree.leaves(compiler.caches.specs(num_blocks))))
            copies = find_copies(hlo, compiler, num_blocks)
        if memory.alias_size_in_bytes < pool_bytes:
            missed.append(f"pool of {pool_bytes} bytes, aliased {memory.alias_size_in_bytes}")
        if copies:
            missed.append(f"copies of weights or pool: {copies[:3]}")
        is_plain = isinstance(shape, StepShape) and shape.sampling is Sampling.PLAIN
        if compiler.model.towers and is_plain and (scatters := find_scatters(hlo)):
            missed.append(f"scatters: {scatters[:3]}")
        if cuts := find_expert_copies(hlo, compiler):
            missed.append(f"copies of a layer's experts: {cuts[:3]}")
        if cuts := find_adapter_copies(hlo, compiler):
            missed.append(f"copies of adapters: {cuts[:3]}")
        temps.append(memory.temp_size_in_bytes)
        collectives = {each.kind: each.count for each in count_collectives(hlo)}
        row = {
            **seconds,
            "temp_mib": round(temps[-1] / 2**20, 1),
            "alias_mib": round(memory.alias_size_in_bytes / 2**20, 1),
            "thunks": count_thunks(listing),
            "nodes": count_nodes(listing),
            "nodes_per_layer": round(count_nodes(listing) / len(compiler.model.config.layers), 1),
            "loops": count_loops(listing),
            "collectives": collectives,
            **kernel_figures(messages),
        }
        missed += find_host_calls(hlo)
        if layout.cross_groups:
            missed += find_spills(messages)
        if holds_loops(compiler) and (outside := {"kWhile", "kConditional"} & row["thunks"].keys()):
            missed.append(f"outside of CUDA graphs: {', '.join(sorted(outside))}")
        if is_step and shape.batch.bucket.num_tokens <= SUMMED_ROWS and temps[-1] >= least_widened(compiler.model):
            missed.append(f"scratch {temps[-1]} of the size of widened weights")
        if is_step and shape.batch.bucket.num_tokens < rows_that_widen(compiler.model):
            missed += [f"widened weights: {array}" for array in find_widened(hlo, compiler.model)]
        asks_nothing = has_kernels and not loops and not holds_loops(compiler)
        if asks_nothing and (asking := find_host_predicates(listing, hlo)):
            missed.append(f"the host is asked: {asking}")
    if temps[-1] - temps[-2] > max(0.01 * temps[-2], SLACK):
        missed.append(f"scratch {temps[-2]} with {blocks[-2]} blocks, {temps[-1]} with {blocks[-1]}")
    expected = expected_collectives(compiler, shape)  # XLA may make one of several
    if any(count > expected.get(kind, 0) for kind, count in row["collectives"].items()):
        missed.append(f"collectives should be {expected}")
    is_decode = isinstance(shape, StepShape) and not shape.is_full and shape.batch.bucket.num_tokens <= SEQS
    if has_kernels and (is_decode or isinstance(shape, PoolShape)) and row["thunks"] != {"kCommandBuffer": 1}:
        missed.append("not one command buffer")
    if has_kernels and compiler.mesh.size == 1 and isinstance(shape, StepShape) and is_decode:
        most = most_nodes(compiler.model) + TRUNCATION_NODES * (shape.sampling is Sampling.TRUNCATED)
        if row["nodes"] > most:
            missed.append(f"more launches than {most}")
    return row | {"missed": missed}


def pool_sizes(compiler: StepCompiler, usable_bytes: int) -> tuple[int, ...]:
    """Return the numbers of blocks that a step is compiled with."""
    layout = compiler.config.kv_layout
    if layout.cross_groups:
        # With more, no more clips have blocks.
        return layout.most_wanted // 2, layout.most_wanted
    if not any(group.causal for group in layout.groups):
        return layout.most_wanted, *ENCODER_BLOCKS
    return BLOCKS if fits(compiler, BLOCKS[-1], usable_bytes) else FEWER_BLOCKS


def kernel_figures(messages: str) -> dict[str, int]:
    """Return the number of kernels that ptxas compiled, and the most registers of one; nothing for a TPU."""
    kernels = read_ptxas(messages)
    return {"kernels": len(kernels), "registers": max(used for used, _ in kernels.values())} if kernels else {}


def find_spills(messages: str) -> list[str]:
    """Return the kernels that spill registers, by ptxas' messages."""
    return [f"{name} spills {spilled} bytes" for name, (_, spilled) in read_ptxas(messages).items() if spilled]


def holds_loops(compiler: StepCompiler) -> bool:
    """Return whether loops, too, are parts of CUDA graphs."""
    return "WHILE" in compiler.options.get("xla_gpu_enable_command_buffer", "")


def least_widened(model: Model) -> float:
    """Return the bytes of the smallest quantized matrix in 16 bits; infinity if no weights are quantized."""
    matrices = [shape for shape in linear_shapes(model.specs) if shape.format is not None]
    return min((2 * shape.num_outputs * shape.num_inputs for shape in matrices), default=math.inf)


def rows_that_widen(model: Model) -> int:
    """Return the number of rows from which on quantized weights may be widened in memory, one matrix at a time."""
    has_kernels = model.ops.linear.implementation in ("gpu", "gpu_mma")
    refused = any(model.ops.linear.refusal(shape) for shape in linear_shapes(model.specs) if shape.format is not None)
    return WIDENED_ROWS if has_kernels and not refused else SUMMED_ROWS + 1


def find_widened(hlo: str, model: Model) -> list[str]:
    """Return the arrays that a program makes in memory and that are a quantized matrix in 16 or 32 bits, or a stack."""
    matrices = {(x.num_outputs, x.num_inputs) for x in linear_shapes(model.specs) if x.format is not None}
    wide = []
    for kind, dtype, dims in made_arrays(hlo):
        sizes = [(axes[0], math.prod(axes[1:])) for axes in (dims, dims[1:]) if axes]
        if dtype in ("bf16", "f16", "f32") and matrices.intersection(sizes):
            wide.append(f"{kind} {dtype}{list(dims)}")
    return wide


def fits(compiler: StepCompiler, num_blocks: int, usable_bytes: int) -> bool:
    """Return whether a device holds the weights, the pool and the feature cache, beside a sixteenth for all else."""
    towers = [compiler.encoder_spec(part) for part in compiler.model.towers]
    specs = [compiler.params_spec, towers, compiler.caches.specs(num_blocks)]
    return sum(map(device_bytes, jax.tree.leaves(specs))) < usable_bytes * 15 // 16


def check_set_adapter(compiler: StepCompiler) -> dict[str, Any]:
    """Compile the program that writes an adapter into its slot, and check that it uses no scratch."""
    memory, hlo, listing, seconds, _ = compile_program(compiler, Upkeep.SET_ADAPTER, BLOCKS[0])
    held = sum(map(device_bytes, jax.tree.leaves(compiler.adapters_spec())))
    missed = []
    if memory.alias_size_in_bytes < held:
        missed.append(f"adapters of {held} bytes, aliased {memory.alias_size_in_bytes}")
    if memory.temp_size_in_bytes > SLACK:
        missed.append(f"scratch {memory.temp_size_in_bytes}")
    if copies := find_copies(hlo, compiler, BLOCKS[0]):
        missed.append(f"copies of adapters: {copies[:3]}")
    sizes = {"temp_mib": memory.temp_size_in_bytes, "alias_mib": memory.alias_size_in_bytes, "adapters_mib": held}
    mib = {name: round(size / 2**20, 1) for name, size in sizes.items()}
    return seconds | mib | {"nodes": count_nodes(listing), "missed": missed}


def check_encoder(compiler: StepCompiler, shape: EncoderShape | ClipShape | AlignShape) -> dict[str, Any]:
    """Compile a program that runs an encoder, and check that it writes in place what it writes."""
    part = shape.part if isinstance(shape, EncoderShape) else "encoder"
    encoder, layout = compiler.model.towers.get(part) or compiler.model.encoder, compiler.config.kv_layout
    assert encoder is not None
    num_blocks = layout.most_wanted if layout.cross_groups else BLOCKS[0]
    memory, hlo, listing, seconds, messages = compile_program(compiler, shape, num_blocks)
    cache, missed = written_bytes(compiler, shape, num_blocks), find_host_calls(hlo)
    if memory.alias_size_in_bytes < cache:
        missed.append(f"cache of {cache} bytes, aliased {memory.alias_size_in_bytes}")
    if not isinstance(shape, EncoderShape):
        if copies := find_copies(hlo, compiler, num_blocks):
            missed.append(f"copies of weights or pool: {copies[:3]}")
        if scores := find_frame_scores(hlo, compiler.config.num_frames):
            missed.append(f"scores of frames: {scores[:3]}")
    tower = sum(map(device_bytes, jax.tree.leaves(compiler.encoder_spec(part))))
    sizes = {
        "temp_mib": memory.temp_size_in_bytes,
        "tower_mib": tower,
        "cache_mib": cache,
        # Those of clips hold what they read of the decoder's weights.
        "inputs_mib": memory.argument_size_in_bytes - tower - cache,
    }
    figures: dict[str, Any] = {name: round(size / 2**20, 1) for name, size in sizes.items()}
    figures |= {"nodes": count_nodes(listing), "encoder": encoder.attention.implementation, "shape": describe(shape)}
    if listing:
        missed += find_spills(messages)
        if not kernel_figures(messages):
            missed.append("ptxas said nothing of any kernel")
        if asked := find_host_predicates(listing, hlo):
            missed.append(f"the host is asked: {asked}")
        figures |= {"thunks": count_thunks(listing), **kernel_figures(messages)}
    return seconds | figures | {"missed": missed}


def written_bytes(compiler: StepCompiler, shape: EncoderShape | ClipShape | AlignShape, num_blocks: int) -> int:
    """Return the bytes of the arrays that an encoder's program is given to write: none of one that aligns."""
    if isinstance(shape, AlignShape):
        return 0
    held = compiler.media_spec() if isinstance(shape, EncoderShape) else compiler.caches.specs(num_blocks)
    return sum(map(device_bytes, jax.tree.leaves(held)))


def find_frame_scores(hlo: str, num_frames: int) -> list[str]:
    """Return the arrays of a program that have two axes as long as a clip's frames, perhaps with padding."""
    padded = -(-num_frames // FRAME_TILE) * FRAME_TILE
    arrays = re.findall(r"= \(?(\w+\[([\d,]+)\])", hlo)
    return sorted(
        {array for array, dims in arrays if sum(num_frames <= x <= padded for x in map(int, dims.split(","))) > 1}
    )


def most_nodes(model: Model) -> int:
    """Return the most launches that a plain step of decodes alone should need."""
    has_quantized = any(shape.format is not None for shape in linear_shapes(model.specs))
    in_batches = model.ops.grouped_matmul.implementation == "xla"
    more = (
        layer.qk_norm * NORM_NODES
        + bool(layer.latent) * LATENT_NODES
        + (MOE_NODES + bool(layer.moe.shared_size) * SHARED_NODES + in_batches * BATCH_NODES if layer.moe else 0)
        + has_quantized * QUANTIZED_NODES
        for layer in model.config.layers
    )
    arrays = array_specs(model.specs.param_specs())
    adapted = sum(arrays[path].shape[0] if arrays[path].stacked else 1 for path in model.adapter_specs())
    return len(model.config.layers) * LAYER_NODES + sum(more) + adapted * ADAPTER_NODES + OTHER_NODES


def expected_collectives(compiler: StepCompiler, shape: StepShape | PoolShape) -> dict[str, int]:
    """Return the most collectives of each kind that a step should need."""
    vocab = VocabShards(compiler.model.config.vocab_size, compiler.mesh.size, MESH_AXES)
    if vocab.num_devices == 1:
        return {}
    is_spread = vocab.vocab_size % vocab.num_devices == 0
    # Attention and MLP, or experts, and what is beside those; and the embedding.
    in_layers = sum(
        layer.has_mixer + layer.has_mlp * (2 if layer.moe and layer.moe.shared_size else 1)
        for layer in compiler.model.config.layers
    )
    expected = {"all-reduce": in_layers + is_spread}
    if isinstance(shape, PoolShape):
        return expected
    if shape.sampling is Sampling.PLAIN and vocab.can_sample:
        # The tiles' maxima and then their sums; and the logits of the tile where either leads.
        expected |= {"all-gather": 2, "all-reduce": expected["all-reduce"] + 2}
        return expected | ({"collective-permute": 1} if vocab.borrowed else {})
    return expected | ({"all-gather": 1} if is_spread else {})


def device_bytes(spec: jax.ShapeDtypeStruct) -> int:
    """Return the bytes that one device holds of an array."""
    return math.prod(shard_shape(spec)) * spec.dtype.itemsize


def compile_program(
    compiler: StepCompiler, shape: ProgramKey, num_blocks: int
) -> tuple[Any, str, str, dict[str, float], str]:
    """Return the compiler's memory analysis, the final HLO, on a GPU the thunks, the seconds of either stage, and what
    the compilers printed: ptxas' messages about a GPU's kernels, but for those of Mosaic GPU that were compiled before.
    """
    platform = compiler.config.platform
    options = compiler.options
    with tempfile.TemporaryDirectory() as folder:
        if platform == "gpu":
            options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        with captured_output() as output:
            compiled, seconds = timed_compile(compiler, shape, num_blocks, options)
        is_gpu = platform == "gpu"
        listing = read_thunks(Path(folder)) if is_gpu else ""
        return compiled.memory_analysis(), compiled.as_text() or "", listing, seconds, output[0]


def timed_compile(
    compiler: StepCompiler, key: ProgramKey, num_blocks: int, options: dict[str, Any]
) -> tuple[Compiled, dict[str, float]]:
    """Return a program, and the seconds that lowering and compiling it took."""
    start = time.monotonic()
    lowered = compiler.lower(key, num_blocks)
    lowered_at = time.monotonic()
    compiled = lowered.compile(compiler_options=options)
    return compiled, {"lower_s": round(lowered_at - start, 1), "compile_s": round(time.monotonic() - lowered_at, 1)}
