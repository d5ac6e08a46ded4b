"""Choose the ops of an engine, by its devices, the shapes of its model and the verdicts of the self check."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config.arguments import EngineArguments
from jaxllm.config.formats import KV_CACHE_DTYPES
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.kv_pool import KVGroup, StateGroup
from jaxllm.execution.mesh import Device
from jaxllm.execution.options import layer_loop
from jaxllm.loading.checkpoint import Checkpoint, held_format
from jaxllm.loading.dtype import multiplies_bfloat16_fast
from jaxllm.models.config import ModelConfig
from jaxllm.models.loop import LayerLoop
from jaxllm.models.plan import CacheGroup, LayerPlan
from jaxllm.models.recurrence import pick_state_ops
from jaxllm.models.shapes import grouped_shapes, head_shapes, linear_shapes, segment_shapes
from jaxllm.models.specs import ModelSpecs
from jaxllm.models.towers.tower import Tower
from jaxllm.models.towers.whisper import ClipEncoder
from jaxllm.models.weights import Ops
from jaxllm.resolve.checkpoint_settings import resolve_quantization
from jaxllm.resolve.resolve_pooling import is_causal
from pallas_kernels import grouped_matmul, indexer, latent_attention, lora, paged_attention, segment_attention
from pallas_kernels.grouped_matmul import GroupedMatmul
from pallas_kernels.indexer import IndexerShape
from pallas_kernels.latent_attention import LatentShape
from pallas_kernels.linear import Linear, fp8_device_refusal, linear_name, rounding_refusal
from pallas_kernels.linear import pick as pick_linear
from pallas_kernels.lora import Lora
from pallas_kernels.paged_attention import AttentionShape, BlockShape, NoAttention, PoolAttention
from pallas_kernels.segment_attention import SegmentAttention
from pallas_kernels.weights import WeightFormat

logger = logging.getLogger(__name__)

_BY_CORES = (paged_attention, latent_attention, indexer, grouped_matmul)
"""The ops that are picked by the number of a device's cores too."""
type _AttentionShape = AttentionShape | LatentShape | IndexerShape
_MODULES: Mapping[type, tuple[Any, str]] = {
    AttentionShape: (paged_attention, "attention runs"),
    LatentShape: (latent_attention, "attention runs"),
    IndexerShape: (indexer, "the indexer of attention runs"),
}
"""The op's module by the type of its shape, and words for what runs there."""
_SHOWN = 4
"""The number of names in a line of the log."""


def detect_architecture(devices: Sequence[Device]) -> str | None:
    """Return a TPU's kind, such as "TPU v6 lite", or the compute capability of NVIDIA's GPUs; others may have none."""
    device = devices[0]
    return device.device_kind if device.platform == "tpu" else getattr(device, "compute_capability", None)


def device_facts(devices: Sequence[Device]) -> dict[str, Any]:
    """Return what ops are picked by: `architecture`, and `num_cores`, the number of a GPU's multiprocessors."""
    num_cores = getattr(devices[0], "core_count", None) if devices[0].platform == "gpu" else None
    return {"architecture": detect_architecture(devices), "num_cores": num_cores}


class EngineOps(NamedTuple):
    """The ops of an engine on one device of its mesh, and the parameters that they multiply by."""

    kv_groups: tuple[KVGroup, ...]
    """The cache groups, each with the attention op of the device's heads."""
    state_groups: tuple[StateGroup, ...]
    """The groups of layers with recurrent state."""
    specs: ModelSpecs
    layers: Ops
    towers: Mapping[str, Tower]
    """The towers with their ops, by the part of the parameters that holds theirs."""
    encoder: ClipEncoder | None = None
    """The encoder of an encoder-decoder with its ops; None in other models."""
    cross_groups: tuple[KVGroup, ...] = ()
    """The cache groups of an encoder's frames."""


@dataclass(frozen=True)
class Picker:
    """Picks ops for the devices of a mesh."""

    mesh: Mesh
    platform: str
    """The kind of the devices: "cpu", "gpu" or "tpu"."""
    disproved: Mapping[str, str]
    """Why kernels must not run on these devices, by `Trial.op`; see `jaxllm/selfcheck`."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts of a device, as `device_facts` does."""
        return device_facts(list(self.mesh.devices.flat))

    def pick(self, module: Any, shape: Any, name: str | None = None, what: str = "") -> Any:
        """Return what an op's module picks for a shape: plain XLA if the op is disproved, unless `name` is another.

        A platform's other kernels do not take the place of disproved ones: a verdict is on the op. The log says why it
        is not the platform's own kernels; `what` are the words for what runs there.
        """
        op_name, facts = module.__name__.removeprefix("pallas_kernels."), self.facts
        if module not in _BY_CORES:
            del facts["num_cores"]
        wrong = self.disproved.get(op_name)
        op, reason = module.pick(shape, self.platform, name or ("xla" if wrong else None), **facts)
        if name is None and (wrong or reason):
            self.tell(what or f"{op.name} runs", wrong or reason)
        elif wrong and name != "xla":
            logger.warning("%s: backend=%r runs the kernels, although %s", op_name, name, wrong)
        return op

    def tell(self, what: str, reason: str | None) -> None:
        """Log why something runs in plain XLA."""
        logger.warning("%s in plain XLA, not in the %s's own kernels: %s", what, self.platform, reason)


def choose_ops(
    args: EngineArguments,
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    dtype: str,
    block_size: int,
    picker: Picker,
    *,
    is_draft: bool = False,
) -> EngineOps:
    """Return the ops of an engine, or of its draft model. The log names ops that run in plain XLA.

    Raises VLLMValidationError for a backend that cannot run the model here, or would change nothing; a draft model may
    have no weights for a `linear_backend` that rounds inputs.
    """
    groups = choose_attention(args, model_config, dtype, block_size, picker)
    cross = choose_attention(args, model_config, dtype, block_size, picker, of_frames=True)
    states = _choose_states(args, model_config, dtype, picker)
    loop = layer_loop(picker.platform, groups, picker.mesh.size)
    quantization = resolve_quantization(args.quantization, checkpoint)
    specs = ModelSpecs(
        model_config,
        dtype,
        loop,
        quantization=quantization,
        formats={} if quantization else _find_formats(checkpoint, model_config, dtype, loop),
        tensor_names=checkpoint.tensors,
    )
    _warn_of_widened(specs)
    if _rounds_unasked(args, checkpoint, specs, picker):
        logger.info(
            "inputs of the file's quantized matmuls are rounded to 8 bits, as llama.cpp rounds them; with a dtype by "
            "name, such as dtype=%r, they stay exact",
            dtype,
        )
        layers = _choose_matmuls(specs, picker)._replace(linear=Linear("cpu_int8"))
    else:
        layers = _choose_matmuls(specs, picker, args.linear_backend, may_round_nothing=is_draft)
    towers, encoder = {}, None
    for part, of_part in specs.encoders.items():
        # Each device has the whole tower.
        ops = _choose_matmuls(of_part, picker)._replace(mesh=None)
        attention = _choose_segment_attention(of_part, groups, picker)
        if of_part.config.clips is None:
            towers[part] = Tower(of_part, ops=ops, attention=attention)
        else:
            encoder = ClipEncoder(of_part, ops=ops, attention=attention)
    return EngineOps(groups, states, specs, layers, towers, encoder, cross)


def choose_attention(
    args: EngineArguments,
    model_config: ModelConfig,
    dtype: str,
    block_size: int,
    picker: Picker,
    *,
    of_frames: bool = False,
) -> tuple[KVGroup, ...]:
    """Return the attention op of each device, and the form of the KV cache, of tokens or of an encoder's frames.

    Layers whose scores depend on distances keep no keys: their op is `RelativeAttention`, which needs no cache.
    """
    groups, dtypes = [], (jnp.dtype(dtype), jnp.dtype(KV_CACHE_DTYPES.get(args.kv_cache_dtype, dtype)))
    plan, by_distance = LayerPlan(model_config.layers), model_config.layers[0].relative is not None
    if by_distance and _attention_backend(args) is None and not of_frames:
        picker.tell("attention runs", "its scores depend on distances")
    for group in plan.cross_groups if of_frames else plan.attention_groups:
        # Where attention is not causal, no keys are read after their step, so that no block falls behind a window.
        window = group.window if group.causal else None
        reach = {"window": window, "attention_chunk": group.attention_chunk, "causal": group.causal}
        backend = _attention_backend(args)
        if plan.groups[group] and not by_distance:
            shape = _shape_of(group, picker.mesh.size, block_size, dtypes)
            attention = _choose_attention_op(shape, picker, backend)
        else:
            name = "xla" if backend == "xla" else "none"
            blocks = BlockShape(block_size, dtypes[1])
            attention = NoAttention(blocks, name, on_gpu=picker.platform == "gpu")
        num_layers = 0 if by_distance else plan.depth(group)
        groups.append(KVGroup(attention=attention, num_layers=num_layers, **reach))
    return tuple(groups)


def _attention_backend(args: EngineArguments) -> str | None:
    return None if args.attention_config is None else args.attention_config.backend


def _shape_of(group: CacheGroup, num_devices: int, block_size: int, dtypes: tuple[Any, Any]) -> _AttentionShape:
    """Return the attention of a cache group on one device, which has a share of the heads.

    It has all heads of an indexer, whose keys are never rounded: rounding could change which tokens are chosen.
    """
    num_heads, num_kv_heads = group.num_heads // num_devices, group.num_kv_heads // num_devices
    if group.is_indexer:
        assert group.top_k is not None
        return IndexerShape(group.num_heads, group.head_dim, group.top_k, block_size, dtypes[0], dtypes[0])
    if group.latent_dim is not None:
        sizes = num_heads, group.latent_dim, group.head_dim - group.latent_dim, block_size
        return LatentShape(*sizes, *dtypes, group.top_k or group.window)
    return AttentionShape(num_heads, num_kv_heads, group.head_dim, block_size, *dtypes)


def _choose_attention_op(shape: _AttentionShape, picker: Picker, backend: str | None) -> PoolAttention:
    module, what = _MODULES[type(shape)]
    try:
        attention = picker.pick(module, shape, backend, what)
    except ValueError as error:
        message = f"attention_config: {error}. Leave backend out, or use 'xla'."
        raise VLLMValidationError(message, parameter="attention_config", value=backend) from error
    if attention.implementation in ("gpu", "gpu_mma"):
        _check_gpu_kernels(attention, backend)
    return attention


def _check_gpu_kernels(attention: PoolAttention, backend: str | None) -> None:
    """Check that this machine can run the kernels: with a good assembler, or in an interpreter that cannot deadlock."""
    if not attention.interpret:
        if attention.implementation != "gpu":
            return  # assemblers are known to go wrong with Hopper's matmuls only
        from pallas_kernels.paged_attention.gpu.assembler import assembler_doubt

        doubt = assembler_doubt()
        if doubt is not None:
            logger.warning("attention may go wrong in the GPU's kernels: %s", doubt)
        return
    from pallas_kernels.paged_attention.gpu.common import require_interpreter_threads

    try:
        require_interpreter_threads()
    except RuntimeError as error:
        raise VLLMValidationError(f"attention_config: {error}", parameter="attention_config", value=backend) from error


def _choose_states(
    args: EngineArguments, model_config: ModelConfig, dtype: str, picker: Picker
) -> tuple[StateGroup, ...]:
    """Return the ops of recurrent states of each device; plain XLA if attention's backend is."""
    groups, plan = [], LayerPlan(model_config.layers)
    name = "xla" if _attention_backend(args) == "xla" else None

    for group in plan.state_groups:
        assert group.state is not None
        ops = pick_state_ops(group.state, picker.mesh.size, dtype, partial(picker.pick, name=name))
        groups.append(StateGroup(ops=ops, num_layers=plan.depth(group)))
    return tuple(groups)


def _find_formats(
    checkpoint: Checkpoint, model_config: ModelConfig, dtype: str, loop: LayerLoop
) -> Mapping[str, WeightFormat]:
    """Return the format of each checkpoint tensor that is held unchanged, by HF name.

    Quantized tensors are, and 16-bit matrices where a CPU's own kernels compute in float32: half the bytes are read,
    with the same results.
    """
    keeps_halves = loop is LayerLoop.IN_PLACE and jnp.dtype(dtype) == jnp.float32
    format_of = partial(held_format, checkpoint) if keeps_halves else checkpoint.format_of
    if checkpoint.tensors:
        formats = {name: format_of(name) for name in checkpoint.tensors}
    elif keeps_halves or checkpoint.is_gguf or checkpoint.config.get("quantization_config"):
        # Its tensors are in the model's form already.
        specs = ModelSpecs(model_config, dtype).param_specs().values()
        formats = {
            source: format_of(source, spec.hf_shape[-1]) for spec in specs if spec.num_inputs for source in spec.sources
        }
    else:
        formats = {}
    return {name: form for name, form in formats.items() if form is not None}


def _warn_of_widened(specs: ModelSpecs) -> None:
    quantized = {name for name, form in specs.formats.items() if not form.is_half}
    params = specs.param_specs().values() if quantized else ()
    names = [source for spec in params if spec.format is None for source in spec.sources if source in quantized]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        logger.warning(
            "quantized weights that no matmul takes as they are will be widened as they are loaded: %s", shown
        )


def _choose_matmuls(
    specs: ModelSpecs, picker: Picker, linear_backend: str = "auto", *, may_round_nothing: bool = False
) -> Ops:
    """Return the ops of a model's layers.

    Raises VLLMValidationError if `linear_backend` rounds inputs and there is nothing to round, unless
    `may_round_nothing`, or the devices cannot.
    """
    if linear_backend == "auto":
        linear = _choose_linear(specs, picker)
    else:
        linear = _rounding_linear(specs, picker, linear_backend, may_round_nothing=may_round_nothing)
    is_in_place, shapes, heads = specs.loop is LayerLoop.IN_PLACE, grouped_shapes(specs), head_shapes(specs)
    return Ops(
        linear,
        picker.pick(grouped_matmul, shapes, what="experts are multiplied") if shapes else GroupedMatmul(),
        picker.mesh,
        # The CPU's own kernel reads the matrices of all heads in place; XLA copies them in each step.
        picker.pick(grouped_matmul, heads, what="matrices of heads are multiplied")
        if is_in_place and heads
        else GroupedMatmul(),
        lora.pick("cpu") if is_in_place else Lora(),
    )


def _choose_linear(specs: ModelSpecs, picker: Picker) -> Linear:
    """Return the op of dense layers. Weights of a format that is disproved are multiplied in plain XLA."""
    what, shapes = "weights are multiplied", linear_shapes(specs)
    if specs.loop is LayerLoop.IN_PLACE:
        linear, refusals = Linear("cpu"), set[str]()
    else:
        shapes = [shape for shape in shapes if shape.format is not None]
        if picker.platform == "cpu" or not shapes:
            return Linear()
        linear, reason = pick_linear(picker.platform, **picker.facts)
        refusals = {refusal for shape in shapes if (refusal := linear.refusal(shape))} | ({reason} if reason else set())
    for text in sorted(refusals):
        picker.tell(what, text)
    formats = dict.fromkeys(shape.format for shape in shapes)
    wrong = {form: text for form in formats if (text := picker.disproved.get(linear_name(form)))}
    for form, text in wrong.items():
        picker.tell(what if form is None else f"weights of {form.name} are multiplied", text)
    return Linear() if wrong.keys() == formats.keys() else replace(linear, without=tuple(wrong))


def _rounding_linear(specs: ModelSpecs, picker: Picker, name: str, *, may_round_nothing: bool) -> Linear:
    """Return the matmuls that round the inputs of quantized weights to 8 bits.

    A warning names the quantized matmuls that stay exact.
    """
    linear = Linear(name)
    refuse = rounding_refusal if name == "cpu_int8" else linear.refusal
    quantized = [shape for shape in linear_shapes(specs) if shape.format is not None and not shape.format.is_half]
    refusals = [refuse(shape) for shape in quantized]
    reasons = sorted({reason for reason in refusals if reason is not None})
    if any(shape.format is not None and not shape.format.is_half for shape in grouped_shapes(specs)):
        reasons.append("its weights are experts'")
    reason = _refuse_rounding(specs, picker, name)
    if reason is None and (None in refusals or may_round_nothing):
        for text in reasons:
            logger.warning("a quantized matmul does not round its inputs to 8 bits: %s", text)
        return linear
    reason = reason or "; ".join(reasons) or "no matmul's weights are quantized (see quantization)"
    message = f"linear_backend={name!r} would round nothing: {reason}. Leave it out."
    raise VLLMValidationError(message, parameter="linear_backend", value=name)


def _rounds_unasked(args: EngineArguments, checkpoint: Checkpoint, specs: ModelSpecs, picker: Picker) -> bool:
    """Return whether inputs of matmuls are rounded to 8 bits although nobody asked for it.

    That is for GGUF files of causal models on a CPU that does not multiply bfloat16, unless a dtype is named.
    """
    is_free = args.linear_backend == args.dtype == "auto" and picker.platform == "cpu"
    is_known = checkpoint.is_gguf and is_causal(specs.config)
    if not (is_free and is_known) or multiplies_bfloat16_fast("cpu") or _refuse_rounding(specs, picker, "cpu_int8"):
        return False
    return any(rounding_refusal(shape) is None for shape in linear_shapes(specs))


def _refuse_rounding(specs: ModelSpecs, picker: Picker, name: str) -> str | None:
    """Return why the devices cannot round inputs as a `linear_backend` does, or None if they can."""
    if name == "cpu_int8":
        is_right = specs.loop is LayerLoop.IN_PLACE
        return None if is_right else "it is for one CPU device with its own kernels"
    is_gpu = picker.platform == "gpu"
    return fp8_device_refusal(picker.facts["architecture"]) if is_gpu else f"it is for GPUs, not a {picker.platform}"


def _choose_segment_attention(vision: ModelSpecs, groups: Sequence[KVGroup], picker: Picker) -> SegmentAttention:
    """Return the attention of a vision tower: plain XLA if that of the text model is."""
    is_plain = any(group.attention.implementation == "xla" for group in groups)
    is_plain |= picker.platform == "cpu" and vision.loop is not LayerLoop.IN_PLACE
    return picker.pick(segment_attention, segment_shapes(vision), "xla" if is_plain else None, "images are attended")
