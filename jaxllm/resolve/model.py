"""Make an engine's model: the form of its weights, and the ops that multiply by them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.options import layer_loop
from jaxllm.loading.checkpoint import Checkpoint, held_format
from jaxllm.loading.load import check_names
from jaxllm.models.loop import LayerLoop
from jaxllm.models.model import Model
from jaxllm.models.params import ParamSpec
from jaxllm.models.shapes import grouped_shapes, head_shapes, linear_shapes, segment_shapes
from jaxllm.models.specs import ModelSpecs
from jaxllm.models.towers.tower import Tower
from jaxllm.models.weights import Ops
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.resolve_engine import detect_architecture, device_facts
from jaxllm.resolve.resolve_speculation import refused_draft
from pallas_kernels.grouped_matmul import GroupedMatmul, pick
from pallas_kernels.linear import Linear, fp8_device_refusal, rounding_refusal
from pallas_kernels.linear import pick as pick_linear
from pallas_kernels.lora import Lora
from pallas_kernels.lora import pick as pick_lora
from pallas_kernels.segment_attention import SegmentAttention
from pallas_kernels.segment_attention import pick as pick_segments
from pallas_kernels.weights import WeightFormat

logger = logging.getLogger(__name__)

_TABLES = ("embed.table", "lm_head.table")
"""The parameters that a draft head may share with the model whose tokens it guesses."""
_SHOWN = 4
"""The number of names in a line of the log."""


def make_model(config: EngineConfig) -> Model:
    """Return the model of an engine."""
    specs = _make_specs(config)
    return _with_ops(config, specs, specs)


def checked_model(config: EngineConfig) -> tuple[Model, Mapping[str, ParamSpec]]:
    """Return the model of an engine and the specs of its parameters, checked against the checkpoint's tensors.

    Raises VLLMValidationError for a checkpoint that does not fit its architecture.
    """
    model = make_model(config)
    return model, _checked(config, model.specs)


def checked_draft(
    config: EngineConfig, draft: EngineConfig, specs: Mapping[str, ParamSpec]
) -> tuple[Model, Mapping[str, ParamSpec]]:
    """Return an engine's draft model and the specs of its own parameters; `specs` are the other model's.

    Raises VLLMValidationError as `checked_model` does.
    """
    try:
        own_specs = _make_specs(draft)
        lent = _lent_to(own_specs, config, draft, specs)
        draft_specs = _make_specs(draft, lent) if lent else own_specs
        model = _with_ops(draft, draft_specs, own_specs, may_round_nothing=True)
        return model, _checked(draft, model.specs)
    except VLLMValidationError as error:
        raise refused_draft(draft.args.model, error) from error


def lent_arrays(model: Model, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that a draft model shares with the other model, as a nested dict."""
    owners = [path.partition(".")[0] for path in model.specs.lent]
    # One table may serve as both.
    return {owner: params[owner if owner in params else "embed"] for owner in owners}


def _lent_to(
    head: ModelSpecs, config: EngineConfig, draft: EngineConfig, specs: Mapping[str, ParamSpec]
) -> Mapping[str, ParamSpec]:
    """Return the specs of the model's tables that a draft head borrows."""
    if draft.model_config.draft_head is None:
        return {}
    tensors, lent = draft.checkpoint.tensors, {}
    for path, spec in head.param_specs(tensors).items():
        if path not in _TABLES:
            continue
        table = specs.get(path, specs["embed.table"])
        is_own = draft.checkpoint is not config.checkpoint and spec.sources[0] in tensors
        if not is_own and table.shape == spec.shape:
            lent[path] = table
    return lent


def _make_specs(config: EngineConfig, lent: Mapping[str, ParamSpec] | None = None) -> ModelSpecs:
    loop = layer_loop(config.platform, config.kv_groups, config.mesh.size)
    return ModelSpecs(
        config.model_config,
        config.dtype,
        loop,
        quantization=config.quantization,
        formats={} if config.quantization else _find_formats(config, loop),
        tensor_names=config.checkpoint.tensors,
        lent=lent,
    )


def _with_ops(
    config: EngineConfig, specs: ModelSpecs, own_specs: ModelSpecs, *, may_round_nothing: bool = False
) -> Model:
    """Return the model of `specs`, with the ops that suit `own_specs`: its parameters without borrowed ones."""
    _warn_of_widened(own_specs)
    ops = _choose_ops(
        own_specs,
        config.platform,
        config.mesh,
        config.args.linear_backend,
        may_round_nothing=may_round_nothing,
        disproved=config.disproved,
    )
    head = None if config.draft is None else config.draft.model_config.draft_head
    features = None if head is None else head.features
    tower = None
    if specs.vision is not None:
        # Each device has the whole tower.
        tower_ops = _choose_ops(specs.vision, config.platform, config.mesh, disproved=config.disproved)
        tower_ops = tower_ops._replace(mesh=None)
        tower = Tower(specs.vision, ops=tower_ops, attention=_choose_segment_attention(config, specs.vision))
    return Model(specs, ops=ops, adapter_shape=config.adapter_shape, features=features, tower=tower)


def _checked(config: EngineConfig, specs: ModelSpecs) -> Mapping[str, ParamSpec]:
    """Return the specs of a model's own parameters, checked against the checkpoint's tensors."""
    params = specs.all_param_specs(config.checkpoint.tensors)
    params = {path: spec for path, spec in params.items() if path not in specs.lent}
    if config.args.load_format != "dummy":
        check_names(params, config.checkpoint, ignored=specs.ignored_tensors)
    return params


def _warn_of_widened(model: ModelSpecs) -> None:
    quantized = {name for name, form in model.formats.items() if not form.is_half}
    specs = model.param_specs().values() if quantized else ()
    names = [source for spec in specs if spec.format is None for source in spec.sources if source in quantized]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        logger.warning(
            "quantized weights that no matmul takes as they are will be widened as they are loaded: %s", shown
        )


def _find_formats(config: EngineConfig, loop: LayerLoop) -> Mapping[str, WeightFormat]:
    """Return the format of each checkpoint tensor that is held unchanged, by HF name.

    Quantized tensors are, and 16-bit matrices where a CPU's own kernels compute in float32: half the bytes are read,
    with the same results.
    """
    checkpoint: Checkpoint = config.checkpoint
    keeps_halves = loop is LayerLoop.IN_PLACE and jnp.dtype(config.dtype) == jnp.float32
    format_of = partial(held_format, checkpoint) if keeps_halves else checkpoint.format_of
    if checkpoint.tensors:
        formats = {name: format_of(name) for name in checkpoint.tensors}
    elif keeps_halves or checkpoint.is_gguf or checkpoint.config.get("quantization_config"):
        # Its tensors are in the model's form already.
        specs = ModelSpecs(config.model_config, config.dtype).param_specs().values()
        formats = {
            source: format_of(source, spec.hf_shape[-1]) for spec in specs if spec.num_inputs for source in spec.sources
        }
    else:
        formats = {}
    return {name: form for name, form in formats.items() if form is not None}


def _choose_ops(
    specs: ModelSpecs,
    platform: str,
    mesh: Mesh,
    linear_backend: str = "auto",
    *,
    may_round_nothing: bool = False,
    disproved: Mapping[str, str],
) -> Ops:
    """Return the ops of a model on the devices of a mesh. The log names ops that run in plain XLA.

    Raises VLLMValidationError if `linear_backend` rounds inputs and there is nothing to round, unless
    `may_round_nothing`, or the devices cannot.
    """
    device = device_facts(list(mesh.devices.flat))
    if linear_backend == "auto":
        linear = _choose_linear(specs, platform, device, disproved.get("linear"))
    else:
        device_reason = _refuse_rounding(linear_backend, platform, specs.loop, device["architecture"])
        linear = _rounding_linear(specs, linear_backend, device_reason, may_round_nothing=may_round_nothing)
    grouped, shapes = GroupedMatmul(), grouped_shapes(specs)
    if shapes:
        wrong = disproved.get("grouped_matmul")
        grouped, reason = pick(shapes, platform, "xla" if wrong else None, **device)
        reason = wrong or reason
        if reason is not None:
            logger.warning("experts are multiplied in plain XLA, not in the %s's own kernels: %s", platform, reason)
    lora = pick_lora("cpu") if specs.loop is LayerLoop.IN_PLACE else Lora()
    return Ops(linear, grouped, mesh, _choose_by_head(specs), lora)


def _choose_segment_attention(config: EngineConfig, vision: ModelSpecs) -> SegmentAttention:
    """Return the attention of a vision tower: plain XLA if that of the text model is.

    The log says why it is plain XLA elsewhere, where the platform has a kernel.
    """
    architecture = detect_architecture(list(config.mesh.devices.flat))
    is_plain = any(group.attention.implementation == "xla" for group in config.kv_groups)
    is_plain |= config.platform == "cpu" and vision.loop is not LayerLoop.IN_PLACE
    wrong = None if is_plain else config.disproved.get("segment_attention")
    name = "xla" if is_plain or wrong else None
    op, reason = pick_segments(segment_shapes(vision), config.platform, name, architecture=architecture)
    reason = wrong or reason
    if reason is not None:
        logger.warning("images are attended in plain XLA, not in the %s's own kernel: %s", config.platform, reason)
    return op


def _choose_by_head(specs: ModelSpecs) -> GroupedMatmul:
    """Return the CPU's own kernel if it can read the matrices of all heads in place; XLA copies them in each step."""
    shapes = head_shapes(specs)
    if specs.loop is not LayerLoop.IN_PLACE or not shapes:
        return GroupedMatmul()
    op, reason = pick(shapes, "cpu")
    if reason is not None:
        logger.warning("matrices of heads are multiplied in plain XLA, not in the cpu's own kernels: %s", reason)
    return op


def _refuse_rounding(name: str, platform: str, loop: LayerLoop, architecture: str | None) -> str | None:
    """Return why the devices cannot round inputs as a `linear_backend` does, or None if they can."""
    if name == "cpu_int8":
        return None if loop is LayerLoop.IN_PLACE else "it is for one CPU device with its own kernels"
    return fp8_device_refusal(architecture) if platform == "gpu" else f"it is for GPUs, not a {platform}"


def _rounding_linear(specs: ModelSpecs, name: str, device_reason: str | None, *, may_round_nothing: bool) -> Linear:
    """Return the matmuls that round the inputs of quantized weights to 8 bits.

    A warning names the quantized matmuls that stay exact. `device_reason` is why the devices cannot, None if they can.
    """
    linear = Linear(name)
    refuse = rounding_refusal if name == "cpu_int8" else linear.refusal
    quantized = [shape for shape in linear_shapes(specs) if shape.format is not None and not shape.format.is_half]
    refusals = [refuse(shape) for shape in quantized]
    reasons = sorted({reason for reason in refusals if reason is not None})
    if any(shape.format is not None and not shape.format.is_half for shape in grouped_shapes(specs)):
        reasons.append("its weights are experts'")
    if device_reason is not None:
        reason = device_reason
    elif None in refusals or may_round_nothing:
        for reason in reasons:
            logger.warning("a quantized matmul does not round its inputs to 8 bits: %s", reason)
        return linear
    else:
        reason = "; ".join(reasons) or "no matmul's weights are quantized (see quantization)"
    message = f"linear_backend={name!r} would round nothing: {reason}. Leave it out."
    raise VLLMValidationError(message, parameter="linear_backend", value=name)


def _choose_linear(specs: ModelSpecs, platform: str, device: Mapping[str, Any], wrong: str | None) -> Linear:
    """Return the op of dense layers; `wrong` is the reason why the platform's own kernels must not run them, if any."""
    if wrong is not None:
        logger.warning("weights are multiplied in plain XLA, not in the %s's own kernels: %s", platform, wrong)
        return Linear("xla")
    if specs.loop is LayerLoop.IN_PLACE:
        return Linear("cpu")
    if platform == "cpu":
        return Linear("xla")
    quantized = [shape for shape in linear_shapes(specs) if shape.format is not None]
    if not quantized:
        return Linear("xla")
    linear, reason = pick_linear(platform, **device)
    refusals = sorted({refusal for shape in quantized if (refusal := linear.refusal(shape))})
    for text in [reason, *refusals] if reason else refusals:
        logger.warning("weights are multiplied in plain XLA, not in the %s's own kernels: %s", platform, text)
    return linear
