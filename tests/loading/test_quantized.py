"""Quantized matrices are read to the bit, whole and by their parts, and what a config says is understood or refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.names import check_names
from jaxllm.loading.open import open_checkpoint, open_config
from jaxllm.loading.quantized import read_scheme
from jaxllm.loading.quantized import words as unpacking
from pallas_kernels.weights import WeightFormat, dequantize
from tests.e2e.media_goldens import folder as media_folder
from tests.loading.files import write_folder
from tests.loading.mxfp4_files import oracle
from tests.loading.quantized_files import MODULE, NAME, SAMPLES, Sample, awq, compressed, fp8, gptq, packed

PLAIN = {"model.norm.weight": np.ones(4, ml_dtypes.bfloat16)}
LINEAR: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def open_sample(path: Path, sample: Sample, more: Mapping[str, np.ndarray] | None = None) -> Checkpoint:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": sample.quantization}
    return open_checkpoint(str(write_folder(path, sample.named | PLAIN | dict(more or {}), config)))


def open_with(path: Path, quantization: Any) -> Checkpoint:
    """Open a config without weights."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "quantization_config": quantization}))
    return open_config(str(path))


def bits(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of numbers, those of all zeros alike."""
    return (np.ascontiguousarray(numbers) + np.float32(0)).view(np.uint32)


def parts_of(checkpoint: Checkpoint, form: WeightFormat, name: str = NAME) -> dict[str, np.ndarray]:
    return {part: checkpoint.read_part(name, part) for part in form.parts}


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_form(tmp_path: Path, kind: str):
    sample = SAMPLES[kind]()
    checkpoint = open_sample(tmp_path, sample)
    info = checkpoint.tensors[NAME]
    assert set(checkpoint.tensors) == {NAME, *PLAIN}
    assert (info.shape, info.dtype) == (sample.numbers.shape, "float32")
    assert info.num_bytes == sum(tensor.nbytes for tensor in sample.tensors.values())
    assert checkpoint.num_bytes == info.num_bytes + 8
    assert checkpoint.weight_type != "float32"
    result = checkpoint.read(NAME)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(bits(result), bits(sample.numbers))
    np.testing.assert_array_equal(checkpoint.read(NAME, 2), result[2])
    form = checkpoint.format_of(NAME)
    assert (form is not None) == sample.is_kept
    if form is None:
        with pytest.raises(ValueError, match="no part 'codes'"):
            checkpoint.read_part(NAME, "codes")
        return
    parts = parts_of(checkpoint, form)
    for part, array in parts.items():
        assert array.dtype == form.dtype(part), part
        rows = () if part == "order" else (info.shape[0],)
        assert array.shape == (*rows, form.width(part, info.shape[1])), part
        if part != "order":
            np.testing.assert_array_equal(checkpoint.read_part(NAME, part, 1), array[1])
    numbers, order = dequantize(parts, form), checkpoint.input_order(NAME)
    assert (order is not None) == ("ordered" in kind)
    if order is not None:
        assert order.dtype == np.int32
        numbers = numbers[:, np.argsort(order)]
    np.testing.assert_array_equal(bits(numbers), bits(result))
    assert checkpoint.format_of("model.norm.weight") is None
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), PLAIN["model.norm.weight"])


@pytest.mark.parametrize("kind", ["awq", "gptq 3 asym", "packed ordered", "fp8 blocks", "modelopt nvfp4", "nf4 nested"])
def test_more_than_one_chunk(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    from jaxllm.loading.quantized import checkpoint

    monkeypatch.setattr(checkpoint, "CHUNK_NUMBERS", 700)
    monkeypatch.setattr(unpacking, "CHUNK_BYTES", 64)
    sample = SAMPLES[kind]()
    np.testing.assert_array_equal(bits(open_sample(tmp_path, sample).read(NAME)), bits(sample.numbers))


def test_a_zero_below_zero_borrows(tmp_path: Path):
    """GPTQModel takes one off whole words of zeros, and puts it back so."""
    sample = gptq(4, is_symmetric=False, is_v1=False)
    stored = (sample.tensors[".qzeros"].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    assert (sample.tensors[".qzeros"].view(np.uint8) & 15 == 0).any()
    old = Sample(
        dict(sample.quantization) | {"checkpoint_format": "gptq"},
        dict(sample.tensors) | {".qzeros": stored},
        sample.numbers,
    )
    np.testing.assert_array_equal(bits(open_sample(tmp_path, old).read(NAME)), bits(sample.numbers))


def test_stacked_experts(tmp_path: Path):
    """HF has inputs first; parts have rows that are outputs."""
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 6, 2, 16), np.uint8), rng.integers(0, 230, (3, 6, 2), np.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    config = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    checkpoint = open_checkpoint(str(write_folder(tmp_path, tensors, config)))
    form = WeightFormat(4, 32, values="e2m1", scale_dtype="bfloat16")
    assert checkpoint.format_of(name) == form
    expected = oracle(blocks, scales).astype(np.float32)
    np.testing.assert_array_equal(bits(dequantize(parts_of(checkpoint, form, name), form)), bits(expected))
    one = {part: checkpoint.read_part(name, part, 1) for part in form.parts}
    np.testing.assert_array_equal(bits(dequantize(one, form)), bits(expected[1]))


def test_a_model_that_sees(tmp_path: Path):
    """The text model is quantized and the tower is not; processors are found as in a checkpoint that is neither."""
    shutil.copytree(media_folder("internvl"), tmp_path, dirs_exist_ok=True)
    plain, tensors, codes = open_checkpoint(str(tmp_path)), load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if name.startswith("language_model.model.layers") and "_proj.w" in name]:
        codes[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = np.array(2, ml_dtypes.bfloat16)
        codes[name.replace(".weight", ".activation_scale")] = np.array(1, ml_dtypes.bfloat16)
    save_file(tensors | codes, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    config = dict(plain.config, quantization_config=quantization | {"modules_to_not_convert": ["model.vision_tower"]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors.keys() == plain.tensors.keys()
    assert checkpoint.image_processor == plain.image_processor != {}
    assert checkpoint.video_processor == plain.video_processor != {}
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(name), 2 * codes[name].astype(np.float32))


def test_what_is_knowingly_left_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    sample = fp8(has_blocks=False, end=".weight_scale")
    extra = {f"{MODULE}.input_scale": np.ones((), np.float32)}
    extra |= {f"model.layers.0.self_attn.{which}_scale": np.ones((), np.float32) for which in "kv"}
    with caplog.at_level(logging.INFO, "jaxllm"):
        checkpoint = open_sample(tmp_path, sample, extra)
    assert set(checkpoint.tensors) == {NAME, *PLAIN}
    assert "1 weights are FP8, 8.00 bits a number" in caplog.text
    assert caplog.text.count("rounds the inputs of matmuls too; here they keep the model's dtype") == 1
    assert caplog.text.count("scales of keys and values are not used") == 1


def test_biases_written_for_nothing(tmp_path: Path):
    bias = {f"{MODULE}.bias": np.zeros(32, np.float16)}
    checkpoint = open_sample(tmp_path, gptq(), bias)
    with pytest.raises(VLLMValidationError) as caught:
        check_names({}, checkpoint)
    assert f"unexpected: {MODULE.replace('.0.', '.0.')}.weight" in str(caught.value)
    assert ".bias" not in str(caught.value)


def test_dtype_is_the_model_s_and_not_the_scales(tmp_path: Path):
    assert open_sample(tmp_path / "x", awq()).dtype == "bfloat16"
    assert open_with(tmp_path / "y", awq().quantization).dtype == "bfloat16"


def change(sample: Sample, **tensors: np.ndarray | None) -> Sample:
    """Return a sample with some tensors replaced, or left out."""
    changed = dict(sample.tensors) | {f".{end}": tensor for end, tensor in tensors.items()}
    kept = {end: tensor for end, tensor in changed.items() if tensor is not None}
    return Sample(sample.quantization, kept, sample.numbers)


BROKEN = {
    "no scales": (change(awq(), scales=None), r"up_proj is quantized, but there is no .*up_proj\.scales"),
    "fewer scales": (change(awq(), scales=np.ones((2, 24), np.float16)), r"up_proj\.scales has shape \[2, 24\]"),
    "scales of no floats": (change(awq(), scales=np.ones((3, 24), np.int8)), r"scales has dtype int8"),
    "words of other integers": (change(awq(), qweight=np.ones((96, 3), np.int64)), r"qweight has dtype int64"),
    "no order": (change(gptq(is_ordered=True), g_idx=None), r"there is no .*g_idx"),
    "no matrix": (change(fp8(), weight=np.ones(4, np.float32).astype(ml_dtypes.float8_e4m3fn)), "expected a matrix"),
    "no block scales": (change(fp8(), weight_scale_inv=None), r"no \.weight_scale_inv or \.weight_scale"),
    "scales of other blocks": (change(fp8(), weight_scale_inv=np.ones((2, 2), np.float32)), r"expected \[2, 3\]"),
    "no zeros": (change(packed(4, is_symmetric=False), weight_zero_point=None), r"there is no .*weight_zero_point"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, fault: str):
    sample, message = BROKEN[fault]
    with pytest.raises(VLLMValidationError, match=message):
        open_sample(tmp_path, sample)


@pytest.mark.parametrize("groups", [np.zeros(96), np.arange(96), np.full(96, -1), np.arange(96) // 48])
def test_groups_that_are_none(tmp_path: Path, groups: np.ndarray):
    checkpoint = open_sample(tmp_path, change(gptq(is_ordered=True), g_idx=groups.astype(np.int32)))
    for read in (lambda: checkpoint.input_order(NAME), lambda: checkpoint.read(NAME)):
        with pytest.raises(
            VLLMValidationError, match=r"up_proj has a g_idx that does not tell 96 inputs into 3 groups of 32"
        ):
            read()


def test_zeros_that_the_config_denies(tmp_path: Path):
    sample = gptq(is_symmetric=False)
    checkpoint = open_sample(
        tmp_path, Sample(dict(sample.quantization) | {"sym": True}, sample.tensors, sample.numbers)
    )
    with pytest.raises(VLLMValidationError, match="sym is true"):
        checkpoint.read(NAME)


REFUSED = {
    "a method": ({"quant_method": "quark"}, "quantized with 'quark'.*only awq, gptq, .*; use the original checkpoint"),
    "no method": ({"bits": 4}, "quantized with None"),
    "AWQ's bits": ({"quant_method": "awq", "bits": 8}, "bits is 8, which is not supported, only 4"),
    "AWQ's layout": ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'.*only gemm"),
    "AWQ without zeros": ({"quant_method": "awq", "zero_point": False}, "zero_point is false"),
    "GPTQ's bits": ({"quant_method": "gptq", "bits": 5}, "bits is 5.*only 2, 3, 4, 8"),
    "GPTQ's layout": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "GPTQ's words": ({"quant_method": "gptq", "pack_dtype": "int64"}, "pack_dtype is 'int64'"),
    "GPTQ's group": ({"quant_method": "gptq", "group_size": "many"}, "group_size is 'many', expected a number"),
    "GPTQ's rules": ({"quant_method": "gptq", "dynamic": {"(": {}}}, r"dynamic has '\('.*no regular expression"),
    "a rule's bits": ({"quant_method": "gptq", "dynamic": {"x": {"bits": 7}}}, "bits is 7"),
    "groups": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups is missing"),
    "sparsity": (compressed("marlin-24", LINEAR), "format is 'marlin-24'"),
    "rotations": (compressed("pack-quantized", LINEAR) | {"transform_config": {"a": 1}}, "transform_config"),
    "a strategy": (compressed("pack-quantized", LINEAR | {"strategy": "attn_head"}), "strategy is 'attn_head'"),
    "weights in motion": (compressed("int-quantized", LINEAR | {"dynamic": True}), "dynamic is True"),
    "a type": (compressed("pack-quantized", LINEAR | {"type": "float"}), "type is 'float'"),
    "a block": ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
    "E5M2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "FP4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    "a skip list": (
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        "modules_to_not_convert is 'lm_head'",
    ),
    "a pattern": ({"quant_method": "awq", "modules_to_not_convert": ["*"]}, r"modules_to_not_convert has '\*'"),
    "FP4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type is 'fp4'.*only nf4"),
    "neither": ({"quant_method": "bitsandbytes"}, "one of load_in_4bit and load_in_8bit"),
    "an algorithm": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'w4a8_awq'.*only fp8"),
    "NVFP4's group": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32"),
    "not an object": ([1], r" is \[1\], expected an object"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_before_weights_are_opened(tmp_path: Path, what: str):
    quantization, message = REFUSED[what]
    with pytest.raises(VLLMValidationError, match=f"config.json: quantization_config.*{message}"):
        open_with(tmp_path, quantization)


def test_skip_lists(tmp_path: Path):
    skipped = ["lm_head", "model.layers.1", "k_proj", "model.layers.2.mlp.*down", "visual."]
    checkpoint = open_with(tmp_path, {"quant_method": "awq", "modules_to_not_convert": skipped})
    plain = ["lm_head", "layers.1.mlp.up_proj", "layers.0.self_attn.k_proj", "layers.2.mlp.x.down", "embed_tokens"]
    plain += ["layers.0.mlp.gate", "layers.0.input_layernorm", "norm"]
    for name in plain:
        assert checkpoint.format_of(("" if name == "lm_head" else "model.") + name + ".weight") is None, name
    for name in ("layers.11.mlp.up_proj", "layers.2.mlp.x.down_proj", "layers.0.mlp.gate_proj"):
        assert checkpoint.format_of(f"model.{name}.weight") is not None, name
    assert checkpoint.format_of("visual.blocks.0.attn.qkv.weight") is None
    assert checkpoint.format_of("model.layers.0.mlp.up_proj.bias") is None


def test_rules_by_module(tmp_path: Path):
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "lm_head": True,
        "dynamic": {r"-:.*\.0\.": {}, r"+:.*down": {"bits": 8, "group_size": 32}, r".*up": {"sym": False}},
    }
    checkpoint = open_with(tmp_path, config)
    numbers = {
        name: checkpoint.format_of(f"{name}.weight")
        for name in ("model.layers.0.mlp.up", "model.layers.1.mlp.down", "model.layers.1.mlp.up", "lm_head")
    }
    assert list(numbers.values()) == [
        None,
        WeightFormat(8, 32, scale_dtype="bfloat16"),
        WeightFormat(4, 128, scale_dtype="bfloat16", zero_dtype="uint8"),
        WeightFormat(4, 128, offset=8, scale_dtype="bfloat16"),
    ]
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]],
    }
    checkpoint = open_with(tmp_path, config)
    assert checkpoint.format_of("model.layers.0.self_attn.q_proj.weight") is not None
    assert checkpoint.format_of("model.layers.0.self_attn.k_proj.weight") is None


def test_targets(tmp_path: Path):
    """A name comes before a pattern, and a pattern before all matmuls."""
    config = compressed("pack-quantized", LINEAR)
    fp8_weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config["config_groups"] |= {
        "group_1": {"targets": ["re:.*down_proj$"], "weights": fp8_weights, "format": "float-quantized"},
        "group_2": {"targets": ["model.layers.0.mlp.down_proj"], "weights": LINEAR | {"num_bits": 8}},
    }
    checkpoint = open_with(tmp_path, config | {"ignore": ["re:.*gate$", "model.layers.3.mlp.up_proj"]})
    by_rows = WeightFormat(8, None, values="e4m3", scale_dtype="float32")
    four = WeightFormat(4, 32, offset=8, scale_dtype="bfloat16")
    assert checkpoint.format_of("model.layers.0.mlp.down_proj.weight") == WeightFormat(8, 32, scale_dtype="bfloat16")
    assert checkpoint.format_of("model.layers.1.mlp.down_proj.weight") == by_rows
    assert checkpoint.format_of("model.layers.1.mlp.up_proj.weight") == four
    assert checkpoint.format_of("model.layers.3.mlp.up_proj.weight") is None
    assert checkpoint.format_of("lm_head.weight") == four


def test_layers_of_modelopt_that_differ(tmp_path: Path):
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4"},
    }
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["model.layers.2*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": inner}))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_config(str(tmp_path))
    formats = [checkpoint.format_of(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(3)]
    assert [None if form is None else form.values for form in formats] == ["e4m3", "e2m1", None]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.text(max_size=6) | st.sampled_from(["re:(", "*", "nf4", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CONFIGS = {kind: json.dumps(make().quantization) for kind, make in SAMPLES.items()}
KEYS = (
    *sorted({key for text in CONFIGS.values() for key in json.loads(text)}),
    *("dynamic", "modules_to_not_convert", "modules_in_block_to_quantize", "quant_algo", "quantized_layers", "ignore"),
    *("llm_int8_skip_modules", "sparsity_config", "exclude_modules", "quantization", "strategy", "actorder"),
)


def refusal(config: Mapping[str, Any]) -> str | None:
    """Return what is said against settings; None if they are understood, and then tell of any module."""
    try:
        scheme = read_scheme(config)
    except ValueError as error:
        return str(error)
    for module in ("model.layers.0.mlp.up_proj", "lm_head", "", "x.gate", "a" * 300):
        form = scheme.format_of(f"{module}.weight", 0)
        assert form is None or form.bits in (2, 3, 4, 5, 6, 8)
    return None


@pytest.mark.loading
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_broken_settings_are_value_errors(data: st.DataObject):
    """Whatever a config holds, it is understood, or refused by name."""
    config = json.loads(CONFIGS[data.draw(st.sampled_from(sorted(SAMPLES)))])
    groups = list(config.get("config_groups", {}).values())
    places = [config, *groups, *(group["weights"] for group in groups)]
    position = data.draw(st.sampled_from(places))
    for _ in range(data.draw(st.integers(1, 3))):
        position[data.draw(st.sampled_from(sorted({*position, *KEYS})))] = data.draw(values)
    message = refusal(config)
    assert message is None or ("quantization_config" in message and len(message) < 1000)


STORED = {kind: make() for kind, make in SAMPLES.items()}
DTYPES = (np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32, ml_dtypes.float8_e4m3fn)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_broken_tensors_are_the_model_s_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    """A tensor that is missing, or has another shape, dtype or content, is named, or read as it is."""
    kind = data.draw(st.sampled_from(sorted(STORED)))
    tensors = dict(STORED[kind].tensors)
    end = data.draw(st.sampled_from(sorted(tensors)))
    how = data.draw(st.sampled_from(("none", "dtype", "shape", "content")))
    tensor = tensors.pop(end)
    if how == "dtype":
        tensors[end] = np.ones(tensor.shape, data.draw(st.sampled_from(DTYPES)))
    elif how == "shape":
        shape = tuple(data.draw(st.lists(st.sampled_from((0, 1, 2, 3, 32, 96, *tensor.shape)), max_size=3)))
        tensors[end] = np.ones(shape, tensor.dtype)
    elif how == "content":
        seed = np.random.default_rng(data.draw(st.integers(0, 99)))
        tensors[end] = seed.integers(0, 256, tensor.nbytes, np.uint8).view(tensor.dtype).reshape(tensor.shape)
    try:
        checkpoint = open_sample(tmp_path_factory.mktemp("x"), Sample(STORED[kind].quantization, tensors, np.empty(0)))
        if NAME in checkpoint.tensors:
            numbers, form = checkpoint.read(NAME), checkpoint.format_of(NAME)
            assert numbers.shape == checkpoint.tensors[NAME].shape
            for part in form.parts if form else ():
                checkpoint.read_part(NAME, part)
    except VLLMValidationError as error:
        message = str(error)
    else:
        message = MODULE
    assert MODULE in message
