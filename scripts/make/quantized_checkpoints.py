"""Write tests/data/quantized: a tiny random Llama in each form of quantization, made by the form's own tool.

Needs an environment of its own: `pip install torch transformers==5.23.0 compressed-tensors==0.20.0 gptqmodel==7.7.0
bitsandbytes==0.50.2 nvidia-modelopt==0.47.0 omegaconf pulp`, then `python scripts/make.py quantized_checkpoints
[CASE ...]`. All of them run on a CPU; AWQ is packed by GPTQModel, FP8 in blocks by transformers.

Each case is a folder with config.json, model.safetensors and golden.npz. The golden has the tool's dequantized float32
numbers by each matrix's name (as a digest; where the tool rounds in another order than jaxllm, the numbers of two
matrices), a prompt, and the log-probabilities of its continuation by HF's model in float32 with these weights.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPT_LEN = 20
GROUP = 16

Made = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A module's tensors by the ends of their names, and the tool's dequantized numbers."""


class Case(NamedTuple):
    """How a case is quantized: `make` gets a matrix [out, in] and its index in the model."""

    quantization: dict[str, Any]
    make: Callable[[torch.Tensor, int], Made]
    dtype: torch.dtype = torch.bfloat16
    is_exact: bool = True
    """The tool's numbers in float32 are rounded once."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Settings that differ from `CONFIG`."""


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Case:
    """Return a case of compressed-tensors with all matmuls quantized alike."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    groups = {"group_0": scheme}
    config = QuantizationConfig(
        config_groups=groups, format=kind, ignore=["lm_head"], quantization_status="compressed"
    ).to_dict()
    compressor = BaseCompressor.get_value_from_registry(kind)
    is_exact = kind != "nvfp4-pack-quantized"

    def make(matrix: torch.Tensor, index: int) -> Made:
        del index
        groups = {"channel": matrix[:, None], "tensor": matrix.reshape(1, 1, -1)}.get(args.strategy)
        if groups is None:
            groups = matrix.unflatten(1, (-1, args.group_size))
        least, most = groups.amin(-1), groups.amax(-1)
        tensors = {"weight": matrix}
        if args.strategy == "tensor_group":
            tensors["weight_global_scale"] = generate_gparam(matrix.min(), matrix.max())
        scale, zero = calculate_qparams(least, most, args, tensors.get("weight_global_scale"))
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        tensors |= {"weight_scale": scale.to(torch.float32 if "weight_global_scale" in tensors else matrix.dtype)}
        if not args.symmetric:
            tensors["weight_zero_point"] = zero
        stored = compressor.compress(dict(tensors), scheme)
        in_float32 = stored | {"weight_scale": stored["weight_scale"].float()} if is_exact else stored
        numbers = compressor.decompress(dict(in_float32), scheme)["weight"]
        return {f".{end}": tensor for end, tensor in stored.items()}, numbers

    return Case(json.loads(json.dumps(config, default=str)), make, is_exact=is_exact)


def gptq(bits: int, *, is_symmetric: bool = True, is_ordered: bool = False, kind: str = "gptq") -> Case:
    """Return a case of GPTQ, rounded to the nearest and packed by GPTQModel; `kind` is the format of zeros."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT

    group, most = GROUP, 2**bits - 1

    def make(matrix: torch.Tensor, index: int) -> Made:
        num_rows, num_inputs = matrix.shape
        groups = torch.arange(num_inputs) // group
        if is_ordered:
            groups = groups[torch.from_numpy(np.random.default_rng(index).permutation(num_inputs))]
        columns = matrix[:, torch.argsort(groups, stable=True)].unflatten(1, (-1, group))
        if is_symmetric:
            scales = (columns.abs().amax(-1) * 2 / most).half().float()
            zeros = torch.full_like(scales, (most + 1) // 2)
        else:
            low, high = columns.amin(-1).clamp(max=0), columns.amax(-1).clamp(min=0)
            scales = ((high - low) / most).half().float()
            zeros = torch.round(-low / scales).clamp(0, most)
        codes = torch.clamp(torch.round(matrix / scales[:, groups]) + zeros[:, groups], 0, most)
        linear = torch.nn.Linear(num_inputs, num_rows, bias=False)
        linear.weight.data = (codes - zeros[:, groups]) * scales[:, groups]
        layer = TorchLinear(
            bits=bits,
            group_size=group,
            sym=is_symmetric,
            desc_act=is_ordered,
            in_features=num_inputs,
            out_features=num_rows,
            format=FORMAT.GPTQ_V2,
        )
        layer.pack(linear, scales, zeros, groups.to(torch.int32))
        layer.post_init()
        tensors = {f".{end}": getattr(layer, end) for end in ("qweight", "qzeros", "scales", "g_idx")}
        layer.scales = layer.scales.float()
        numbers = layer.dequantize_weight().T
        if kind == "gptq":
            from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

            convert_gptq_v2_to_v1_format_module(layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
            tensors[".qzeros"] = layer.qzeros
        return {end: tensor.clone() for end, tensor in tensors.items()}, numbers

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": is_symmetric,
        "desc_act": is_ordered,
        "lm_head": False,
        "checkpoint_format": kind,
        "pack_dtype": "int32",
    }
    return Case(config, make, torch.float16)


def awq() -> Case:
    """Return a case of AWQ without its search for scales, packed by GPTQModel."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    def make(matrix: torch.Tensor, index: int) -> Made:
        del index
        num_rows, num_inputs = matrix.shape
        groups = matrix.unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half()
        zeros = torch.round(-low / scales.float()).clamp(0, 15)
        codes = torch.clamp(torch.round(groups / scales[..., None].float()) + zeros[..., None], 0, 15)
        linear = torch.nn.Linear(num_inputs, num_rows, bias=False)
        linear.weight.data = ((codes - zeros[..., None]) * scales[..., None].float()).flatten(1)
        layer = AwqTorchLinear(
            bits=4,
            group_size=GROUP,
            sym=False,
            desc_act=False,
            in_features=num_inputs,
            out_features=num_rows,
            bias=False,
            register_buffers=False,
        )
        layer.pack(linear, scales.float(), zeros)
        numbers = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.half().float(), 4, GROUP).T
        tensors = {".qweight": layer.qweight, ".qzeros": layer.qzeros, ".scales": layer.scales.half()}
        return tensors, numbers

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Case(config | {"modules_to_not_convert": None}, make, torch.float16)


def bits_and_bytes(*, is_4bit: bool, is_nested: bool = False) -> Case:
    """Return a case of bitsandbytes."""
    from bitsandbytes import functional

    def make_nf4(matrix: torch.Tensor, index: int) -> Made:
        del index
        codes, state = functional.quantize_4bit(matrix, quant_type="nf4", compress_statistics=is_nested)
        tensors = {".weight": codes} | {f".weight.{end}": value for end, value in state.as_dict(packed=True).items()}
        # A bfloat16 model rounds these float32 numbers.
        state.dtype = torch.float32
        return tensors, functional.dequantize_4bit(codes, state)

    def make_int8(matrix: torch.Tensor, index: int) -> Made:
        del index
        codes, scales, _ = functional.int8_vectorwise_quant(matrix.half())
        numbers = functional.int8_vectorwise_dequant(codes, scales)
        return {".weight": codes, ".SCB": scales, ".weight_format": torch.tensor(0, dtype=torch.uint8)}, numbers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=is_4bit,
        load_in_8bit=not is_4bit,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=is_nested,
    )
    # On a CPU its blocks have to end with rows.
    sizes = (("hidden_size", 64), ("head_dim", 32)) if is_4bit else ()
    make = make_nf4 if is_4bit else make_int8
    settings = config.to_dict() | {"llm_int8_skip_modules": ["lm_head"]}
    return Case(settings, make, is_exact=is_4bit and not is_nested, sizes=sizes)


def fp8_blocks() -> Case:
    """Return a case of FP8 in blocks of 16 x 16, by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    settings = transformers.FineGrainedFP8Config(weight_block_size=(GROUP, GROUP), modules_to_not_convert=["lm_head"])
    quantizer: Any = SimpleNamespace(quantization_config=settings)

    def make(matrix: torch.Tensor, index: int) -> Made:
        del index
        made = Fp8Quantize(quantizer).convert({"x.weight": matrix})
        codes, scales = made["x.weight"], made["x.weight_scale_inv"]
        numbers = Fp8Dequantize(quantizer)._dequantize_one(codes, scales)
        return {".weight": codes, ".weight_scale_inv": scales}, numbers

    return Case(json.loads(settings.to_json_string(use_diff=False)), make)


def modelopt(algorithm: str) -> Case:
    """Return a case of ModelOpt, which keeps its settings in a separate file."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    def make_fp8(matrix: torch.Tensor, index: int) -> Made:
        scale = matrix.abs().amax().float() / 448
        codes, _ = FP8QTensor.quantize(matrix.float(), scale)
        numbers = codes.dequantize(torch.float32, scale=scale)
        stored = {".weight": codes._quantized_data, ".weight_scale": scale}
        return stored | {".input_scale": torch.tensor(0.5 + index)}, numbers

    def make_nvfp4(matrix: torch.Tensor, index: int) -> Made:
        codes, scales, factor = NVFP4QTensor.quantize(matrix.float(), 16)
        numbers = codes.dequantize(torch.float32, scale=scales, double_scale=factor, block_sizes={-1: 16})
        tensors = {".weight": codes._quantized_data, ".weight_scale": scales, ".weight_scale_2": factor}
        return tensors | {".input_scale": torch.tensor(0.5 + index)}, numbers

    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if algorithm == "NVFP4":
        quantization["group_size"] = 16
    config = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    return Case(config, make_nvfp4 if algorithm == "NVFP4" else make_fp8, is_exact=algorithm == "FP8")


INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
BY_TOKEN: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CASES: dict[str, Callable[[], Case]] = {
    "awq": awq,
    "gptq_4bit": lambda: gptq(4),
    "gptq_4bit_asym_act_order": lambda: gptq(4, is_symmetric=False, is_ordered=True),
    "gptq_4bit_asym_v2": lambda: gptq(4, is_symmetric=False, kind="gptq_v2"),
    "gptq_3bit": lambda: gptq(3),
    "gptq_2bit_asym": lambda: gptq(2, is_symmetric=False),
    "gptq_8bit": lambda: gptq(8),
    "gptq_8bit_asym_act_order": lambda: gptq(8, is_symmetric=False, is_ordered=True),
    "ct_w4a16": lambda: compressed("pack-quantized", INT4),
    "ct_w4a16_asym": lambda: compressed("pack-quantized", INT4 | {"symmetric": False}),
    "ct_w8a16": lambda: compressed("pack-quantized", INT8),
    "ct_w8a8": lambda: compressed("int-quantized", INT8, BY_TOKEN),
    "ct_w8a16_asym": lambda: compressed("pack-quantized", INT4 | {"num_bits": 8, "symmetric": False}),
    "ct_fp8_tensor": lambda: compressed("float-quantized", FP8 | {"strategy": "tensor"}),
    "ct_fp8_channel": lambda: compressed("float-quantized", FP8 | {"strategy": "channel"}),
    "ct_nvfp4": lambda: compressed(
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    ),
    "bnb_nf4": lambda: bits_and_bytes(is_4bit=True),
    "bnb_nf4_nested": lambda: bits_and_bytes(is_4bit=True, is_nested=True),
    "bnb_int8": lambda: bits_and_bytes(is_4bit=False),
    "fp8_blocks": fp8_blocks,
    "modelopt_fp8": lambda: modelopt("FP8"),
    "modelopt_nvfp4": lambda: modelopt("NVFP4"),
}


def digest(numbers: torch.Tensor) -> np.ndarray:
    """Return a digest of float32 numbers; -0.0 counts as 0.0."""
    assert numbers.dtype == torch.float32
    return np.array(hashlib.sha256((numbers.contiguous() + 0.0).numpy().tobytes()).hexdigest())


@torch.no_grad()
def make_case(name: str, case: Case, folder: Path) -> None:
    """Write one case."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = transformers.LlamaConfig(**(CONFIG | dict(case.sizes)), dtype=str(case.dtype).removeprefix("torch."))
    config.architectures = ["LlamaForCausalLM"]
    model = transformers.LlamaForCausalLM(config).eval().float()
    rng = np.random.default_rng(0)
    tensors, arrays = {}, {}
    for index, (path, param) in enumerate(model.named_parameters()):
        drawn = torch.from_numpy(rng.standard_normal(tuple(param.shape), dtype=np.float32))
        value = (
            1 + 0.3 * drawn
            if param.ndim == 1
            else 0.6 * drawn
            if "embed" in path
            else 1.3 * drawn / param.shape[1] ** 0.5
        )
        value = value.to(case.dtype)
        if param.ndim == 2 and "embed" not in path:
            stored, numbers = case.make(value if case.dtype == torch.bfloat16 else value.float(), index)
            tensors |= {path.removesuffix(".weight") + end: tensor.contiguous() for end, tensor in stored.items()}
            if case.is_exact:
                arrays[path] = digest(numbers)
            elif path.endswith(("q_proj.weight", "down_proj.weight")):
                arrays[path] = numbers.float().numpy()
            value = numbers
        else:
            tensors[path] = value
        param.copy_(value)
    prompt = rng.integers(6, CONFIG["vocab_size"], PROMPT_LEN)
    logprobs = torch.log_softmax(model(input_ids=torch.from_numpy(prompt)[None]).logits[0], dim=-1)
    arrays |= {"prompt": prompt.astype(np.int32), "logprobs": logprobs[-1].numpy()}
    np.savez_compressed(folder / "golden.npz", **arrays)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads(config.to_json_string())
    if "quantization" in case.quantization:
        (folder / "hf_quant_config.json").write_text(json.dumps(case.quantization, indent=2) + "\n")
    else:
        settings["quantization_config"] = case.quantization
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir()) // 1024
    print(f"{name}: {size} KB")


def main() -> None:
    """Write the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    root = Path(__file__).parents[2] / "tests" / "data" / "quantized"
    for name in parser.parse_args().cases or CASES:
        make_case(name, CASES[name](), root / name)


if __name__ == "__main__":
    main()
