"""Arguments become a configuration: what is checked when, what the checkpoint decides, what the defaults are."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm import LLM
from jaxllm.config.arguments import EngineArguments
from jaxllm.config.environment import default_cache_dir, environment
from jaxllm.config.groups import AttentionConfig, ReasoningConfig, StructuredOutputsConfig
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logits_processors import LogitsProcessor
from jaxllm.models.config import LayerSpec, ModelConfig, RopeConfig
from jaxllm.models.loop import LayerLoop
from jaxllm.resolve import limits
from jaxllm.resolve import resolve_engine as resolve_module
from jaxllm.resolve.checkpoint_settings import (
    apply_overrides,
    default_sampling_params,
    resolve_batch_invariant,
)
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.media_settings import media_settings
from jaxllm.scheduling.config import StepTarget
from jaxllm.usage.usage_lib import UsageContext
from pallas_kernels.native.processor import AVX2, AVX512, x86
from tests.architecture.sources import product
from tests.e2e.media_goldens import folder as media_folder
from tests.models.tiny import folder
from tests.models.tiny import folder as tiny_folder

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

type MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write a folder with config.json and perhaps generation_config.json, to be opened with random weights."""

    def make(generation_config: dict[str, Any] | None = None, **config: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | config))
        if generation_config is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation_config))
        return folder

    return make


def resolve(model: Path | str, usage_context: UsageContext | None = None, /, **fields: Any) -> EngineConfig:
    return EngineArgs(model=str(model), load_format="dummy", **fields).create_engine_config(usage_context)


@pytest.fixture
def on_platform(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda platform: monkeypatch.setattr(resolve_module, "detect_platform", lambda devices: platform)


def test_cpu_defaults(make_model: MakeModel):
    config = resolve(make_model())
    assert (config.platform, config.block_size, config.max_num_batched_tokens, config.max_num_seqs) == (
        "cpu",
        128,
        512,
        256,
    )
    assert (config.enable_prefix_caching, config.enable_chunked_prefill, config.async_scheduling) == (True, True, True)
    assert (config.max_model_len, config.max_model_len_can_shrink) == (4096, True)
    assert (config.dtype, config.args.gpu_memory_utilization, config.args.scheduling_policy) == (
        "bfloat16",
        0.9,
        "fcfs",
    )
    assert (config.max_logprobs, config.args.tokenizer, config.scheduler_cls) == (20, None, None)
    assert config.default_sampling_params == {}
    assert config.model_config.architecture == "LlamaForCausalLM"


def test_prompts_leave_streams_time(make_model: MakeModel, on_platform: Callable[[str], None]):
    model, server = make_model(), UsageContext.OPENAI_API_SERVER
    assert resolve(model).step_target is None
    assert resolve(model, UsageContext.OPENAI_BATCH_RUNNER).step_target is None
    assert resolve(model, itl_target_ms=40).step_target == StepTarget(0.04)
    online = resolve(model, server).step_target
    assert online is not None
    assert (online.seconds, online.by_decodes) == (0.15, 1.75)
    assert resolve(model, server, itl_target_ms=0).step_target is None
    assert resolve(model, server, enable_chunked_prefill=False, max_model_len=64).step_target is None
    with pytest.raises(VLLMValidationError, match="itl_target_ms=40 cuts prompts"):
        resolve(model, itl_target_ms=40, enable_chunked_prefill=False, max_model_len=64)
    on_platform("gpu")
    assert resolve(model, server).step_target is None


@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_other_backends_of_structured_outputs(make_model: MakeModel, backend: str, caplog: pytest.LogCaptureFixture):
    assert resolve(make_model(), structured_outputs_config={"backend": backend})
    assert [message for message in caplog.messages if "llguidance does the work" in message] == [
        f"structured_outputs_config: llguidance does the work of backend={backend!r}."
    ]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerator_defaults(make_model: MakeModel, on_platform: Callable[[str], None], platform: str):
    on_platform(platform)
    config = resolve(make_model())
    assert (config.block_size, config.max_num_batched_tokens, config.max_num_seqs) == (64, 2048, 256)


class Gpu:
    """A GPU as JAX shows it; only NVIDIA's have a compute capability."""

    platform, device_kind, id, process_index = "gpu", "a GPU", 0, 0

    def __init__(self, compute_capability: str | None) -> None:
        self.reported: int | None = None
        if compute_capability is not None:
            self.compute_capability = compute_capability

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.reported is None else {"bytes_limit": self.reported}


@pytest.mark.parametrize(
    ("kind", "reported", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", None, (16_384, 8192, 1024)),
        ("NVIDIA A100-SXM4-80GB", None, (2048, 2048, 256)),
        ("NVIDIA L40S", None, (2048, 2048, 256)),
        ("a GPU", 71 * 2**30, (16_384, 8192, 1024)),
        ("a GPU", 69 * 2**30, (2048, 2048, 256)),
        ("a GPU", None, (2048, 2048, 256)),
    ],
)
def test_gpus_with_much_memory_have_large_steps(
    make_model: MakeModel, kind: str, reported: int | None, expected: tuple[int, int, int]
):
    gpu, model = Gpu("9.0"), make_model(head_dim=64)
    gpu.device_kind, gpu.reported = kind, reported
    settled = [
        EngineArgs(str(model), load_format="dummy").create_engine_config(usage, devices=[gpu])
        for usage in (UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER)
    ]
    assert (*(config.max_num_batched_tokens for config in settled), settled[0].max_num_seqs) == expected
    assert settled[1].max_num_seqs == expected[-1]


@pytest.mark.parametrize("compute_capability", ["7.5", "8.0", "9.0", "12.0", None])
def test_a_gpu_runs_its_own_kernels_or_plain_xla(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture, compute_capability: str | None
):
    def resolve_on_gpu(**fields: Any) -> EngineConfig:
        return EngineArgs(model=str(model), load_format="dummy", **fields).create_engine_config(devices=[gpu])

    model, gpu = make_model(head_dim=64), Gpu(compute_capability)
    attention = resolve_on_gpu().kv_groups[0].attention
    own_kernels = {"attention_config": AttentionConfig(backend="gpu")}
    if compute_capability == "9.0":
        assert attention.implementation == resolve_on_gpu(**own_kernels).kv_groups[0].attention.implementation == "gpu"
        assert not attention.interpret
        assert "plain XLA" not in caplog.text
        return
    if compute_capability in ("8.0", "12.0"):
        assert attention.implementation == "gpu_mma"
        assert "attention runs in plain XLA" not in caplog.text
        return
    words = f"compute capability {compute_capability}" if compute_capability else "not NVIDIA's (ROCm)"
    assert attention.implementation == "xla"
    assert "attention runs in plain XLA, not in the gpu's own kernels: the kernels are for" in caplog.text
    assert words in caplog.text
    with pytest.raises(VLLMValidationError, match=re.escape(words)) as caught:
        resolve_on_gpu(**own_kernels)
    assert (caught.value.parameter, caught.value.value) == ("attention_config", "gpu")


@pytest.mark.parametrize(
    ("config", "fields", "missing"),
    [
        ({"head_dim": 80}, {}, "head_dim must be 64, 128 or 256, not 80"),
        ({"head_dim": 64}, {"dtype": "float32"}, "dtype must be bfloat16, not float32"),
        ({"head_dim": 64}, {"block_size": 8}, "block_size must be 16, 32, 64, 128, not 8"),
    ],
)
def test_what_a_hoppers_kernels_do_not_take_is_named(
    make_model: MakeModel,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    fields: dict[str, Any],
    missing: str,
):
    args = EngineArgs(model=str(make_model(**config)), load_format="dummy", **fields)
    assert args.create_engine_config(devices=[Gpu("9.0")]).kv_groups[0].attention.implementation == "xla"
    assert missing in caplog.text


def test_a_cpu_needs_threads_to_interpret_gpu_kernels(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch):
    interpreted = {"attention_config": {"backend": "gpu"}}
    monkeypatch.setenv("NPROC", "8")
    assert resolve(make_model(head_dim=64), **interpreted).kv_groups[0].attention.interpret
    monkeypatch.setenv("NPROC", "7")
    with pytest.raises(VLLMValidationError, match="NPROC=8") as caught:
        resolve(make_model(head_dim=64), **interpreted)
    assert (caught.value.parameter, caught.value.value) == ("attention_config", "gpu")


@pytest.mark.parametrize(
    ("fields", "fraction"),
    [
        ({}, "0.95"),
        ({"gpu_memory_utilization": 0.4}, "0.45"),
        ({"gpu_memory_utilization": 1.0}, "0.97"),
        ({"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 1000}, "0.97"),  # of the user's own size
    ],
)
def test_jax_is_told_how_much_of_a_gpu_to_take(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], fraction: str
):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)
    resolve(make_model(), **fields)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == fraction
    os.environ.pop("XLA_CLIENT_MEM_FRACTION")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # that says when memory is taken, not how much
    resolve(make_model(), **fields)
    assert os.environ.pop("XLA_CLIENT_MEM_FRACTION") == fraction
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.3"
    resolve(make_model(), **fields)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize(
    ("fields", "tokens", "seqs"),
    [
        ({"max_num_batched_tokens": 64}, 64, 64),
        ({"max_num_seqs": 1000}, 1000, 1000),
        ({"max_num_seqs": 8}, 512, 8),
        ({"enable_chunked_prefill": False}, 4096, 256),
    ],
)
def test_limits_depend_on_one_another(make_model: MakeModel, fields: dict[str, Any], tokens: int, seqs: int):
    config = resolve(make_model(), **fields)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, seqs)


def test_sizes_that_no_step_has(make_model: MakeModel, caplog: pytest.LogCaptureFixture):
    fields: dict[str, Any] = {"cudagraph_capture_sizes": [8, 64, 128, 512], "max_num_batched_tokens": 64}
    assert resolve(make_model(), **fields).cudagraph_capture_sizes == (8, 64, 128, 512)
    assert "no step has 128, 512 tokens, since max_num_batched_tokens is 64" in caplog.text


def test_whole_prompts_need_room(make_model: MakeModel):
    with pytest.raises(VLLMValidationError, match="max_model_len=4096") as caught:
        resolve(make_model(), enable_chunked_prefill=False, max_num_batched_tokens=512)
    assert caught.value.parameter == "max_num_batched_tokens"


@pytest.mark.parametrize(
    ("requested", "expected"), [(None, (4096, True)), (-1, (4096, True)), (4096, (4096, False)), (7, (7, False))]
)
def test_max_model_len(make_model: MakeModel, requested: int | None, expected: tuple[int, bool]):
    config = resolve(make_model(), max_model_len=requested)
    assert (config.max_model_len, config.max_model_len_can_shrink) == expected


def test_longer_than_the_context(make_model: MakeModel):
    with pytest.raises(VLLMValidationError, match="4096 tokens") as caught:
        resolve(make_model(), max_model_len=4097)
    assert caught.value.parameter == "max_model_len"
    assert (
        resolve(make_model(), max_model_len=8192, hf_overrides={"max_position_embeddings": 8192}).max_model_len == 8192
    )


def decoder(*ropes: RopeConfig) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=32,
        layers=tuple(
            LayerSpec(num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, scale=1.0, rope=rope)
            for rope in (0, len(ropes) - 1)
        ),
        ropes=ropes,
        max_position_embeddings=1000,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize(
    ("ropes", "length"),
    [
        ((RopeConfig(),), 1000),
        ((RopeConfig(rope_type="llama3", factor=8.0),), 1000),
        ((RopeConfig(rope_type="linear", factor=4.0),), 4000),
        ((RopeConfig(rope_type="dynamic", factor=2.0, max_position_embeddings=1000),), 2000),
        # Nomic Embed's length is the scaled one.
        ((RopeConfig(rope_type="dynamic", factor=2.0, max_position_embeddings=250),), 1000),
        ((RopeConfig(rope_type="ntk", factor=8.0),), 1000),
        ((RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=1000),), 4000),
        ((RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=250),), 1000),
        ((RopeConfig(rope_type="linear", factor=8.0), RopeConfig()), 1000),
        ((RopeConfig(rope_type="longrope", factor=8.0, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4),), 1000),
    ],
)
def test_context_length(ropes: tuple[RopeConfig, ...], length: int):
    assert limits._context_length(decoder(*ropes)) == length


def test_the_checks_are_in_order(make_model: MakeModel):
    """Each stage's error hides all later ones: values, then checkpoint, architecture, length."""
    bad = {"max_model_len": 10**6, "hf_overrides": {"architectures": ["NoSuchModel"]}}
    with pytest.raises(VLLMValidationError, match=r"^seed"):
        resolve("./nowhere", seed=-1, **bad)
    with pytest.raises(VLLMValidationError, match="nowhere"):
        resolve("./nowhere", **bad)
    with pytest.raises(VLLMValidationError, match="NoSuchModel"):
        resolve(make_model(), **bad)
    with pytest.raises(VLLMValidationError, match=r"^max_model_len"):
        resolve(make_model(), max_model_len=10**6)


def test_arguments_changed_later_are_checked_again(make_model: MakeModel):
    args = EngineArgs(model=str(make_model()), load_format="dummy")
    args.block_size = 24
    with pytest.raises(VLLMValidationError, match="block_size"):
        args.create_engine_config()
    args.block_size = None
    config = args.create_engine_config()
    args.seed = 7
    assert config.args.seed == 0, "a settled engine keeps what it was made from"


def test_a_settled_setting_is_read_from_the_configuration():
    """Only resolution reads what the user asked for: `config.args.max_model_len` may be None."""
    settled = {field.name for field in dataclasses.fields(EngineConfig)} & EngineArguments.__dataclass_fields__.keys()
    assert {"max_model_len", "dtype", "chat_template", "num_gpu_blocks_override"} < settled
    # These are settled under other names.
    settled |= {"runner", "convert", "attention_config", "hf_overrides", "override_generation_config"}
    reading = re.compile(rf"\bargs\.({'|'.join(settled)})\b")
    readers = {source.where for source in product() if reading.search(source.text)}
    assert {where for where in readers if not where.startswith("jaxllm/resolve/resolve_")} == {
        "jaxllm/resolve/encoder_decoders.py",
        "jaxllm/resolve/limits.py",
    }


def test_unknown_architecture_names_the_nearest(make_model: MakeModel):
    with pytest.raises(VLLMValidationError, match=r"nearest to it is LlamaForCausalLM.*register_model") as caught:
        resolve(make_model(architectures=["LlamasForCausalLM"]))
    assert caught.value.parameter == "model"


def test_unknown_architecture_is_refused_before_weights_are_opened(make_model: MakeModel):
    model = make_model(architectures=["NoSuchModel"])
    (model / "model.safetensors").write_bytes(b"not to be opened")
    with pytest.raises(VLLMValidationError, match="'NoSuchModel' is not supported"):
        LLM(str(model))
    with pytest.raises(VLLMValidationError, match=r"model\.safetensors: "):
        LLM(str(model), hf_overrides={"architectures": ["LlamaForCausalLM"]})


def test_the_first_supported_architecture_is_taken(make_model: MakeModel):
    config = resolve(make_model(architectures=["NoSuchModel", "LlamaForCausalLM", "MistralForCausalLM"]))
    assert config.model_config.architecture == "LlamaForCausalLM"
    with pytest.raises(VLLMValidationError, match="'NoSuchModel' is not supported"):
        resolve(make_model(architectures=["NoSuchModel", "NorThisModel"]))
    with pytest.raises(VLLMValidationError, match="expected a list"):
        resolve(make_model(architectures=["LlamaForCausalLM", 3]))


def test_learned_positions_bound_the_length(make_model: MakeModel):
    opt = {"architectures": ["OPTForCausalLM"], "max_position_embeddings": 2048}
    assert resolve(make_model(**opt)).max_model_len == 2048
    assert resolve(make_model(**opt), max_model_len=100).max_model_len == 100
    with pytest.raises(VLLMValidationError, match=r"context of 2048 tokens\. Lower it: .* learned") as caught:
        resolve(make_model(**opt), max_model_len=2049)
    assert caught.value.parameter == "max_model_len"


def test_nothing_bounds_the_length_of_a_model_without_attention(make_model: MakeModel):
    config = resolve(folder("mamba"))
    assert (config.max_model_len, config.max_model_len_can_shrink) == (2048, True)
    assert resolve(folder("mamba"), max_model_len=10**6).max_model_len == 10**6
    named = {"architectures": ["MambaForCausalLM"], "num_hidden_layers": 2, "max_position_embeddings": 300}
    assert resolve(make_model(**named)).max_model_len == 300


@pytest.mark.parametrize(("backend", "loop"), [(None, LayerLoop.IN_PLACE), ("xla", LayerLoop.SWITCH)])
def test_a_model_without_attention_runs_in_the_cpus_own_kernels_too(backend: str | None, loop: LayerLoop):
    config = resolve(folder("mamba2"), attention_config={"backend": backend})
    [group] = config.kv_groups
    assert (group.num_layers, group.block_bytes, group.attention.implementation) == (0, 0, backend or "none")
    assert config.ops.specs.loop is loop


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_gpus_compile_decodes_alone_without_attention_too(on_platform: Callable[[str], None], platform: str):
    on_platform(platform)
    [group] = resolve(folder("mamba2")).kv_groups
    assert group.attention.takes_decodes_alone == (platform == "gpu")


def test_remote_code_is_refused_by_name(make_model: MakeModel):
    model = make_model(architectures=["TheirModel"], auto_map={"AutoModelForCausalLM": "modeling.TheirModel"})
    with pytest.raises(VLLMValidationError, match=r"never run.*register_model"):
        resolve(model)


def test_quantized_checkpoints_are_refused_by_name(make_model: MakeModel):
    with pytest.raises(VLLMValidationError, match=r"'aqlm'.*supported, only awq, gptq"):
        resolve(make_model(quantization_config={"quant_method": "aqlm"}))
    with pytest.raises(VLLMValidationError, match="bits is 5, which is not supported, only 4"):
        resolve(make_model(quantization_config={"quant_method": "awq", "bits": 5}))


def test_malformed_config_is_the_models_error(make_model: MakeModel):
    with pytest.raises(VLLMValidationError, match=r"query heads") as caught:
        resolve(make_model(num_attention_heads=3))
    assert caught.value.parameter == "model"


def test_overrides_merge_nested_configs_and_replace_the_rest():
    config = {"a": 1, "text_config": {"b": 1, "c": 2}, "rope_scaling": {"factor": 2}}
    overrides = {"text_config": {"b": 3}, "rope_scaling": {"type": "x"}, "d": 4}
    assert apply_overrides(config, overrides) == {
        "a": 1,
        "text_config": {"b": 3, "c": 2},
        "rope_scaling": {"type": "x"},
        "d": 4,
    }
    assert config["text_config"] == {"b": 1, "c": 2}


GENERATION: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": None,
    "max_new_tokens": 99,
    "eos_token_id": [1, 2],
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99}),
        ({"generation_config": "vllm"}, {}),
        ({"override_generation_config": {"top_p": 0.5}}, {"temperature": 0.6, "top_p": 0.5, "max_tokens": 99}),
        ({"generation_config": "vllm", "override_generation_config": {"max_new_tokens": 5}}, {"max_tokens": 5}),
    ],
)
def test_default_sampling(make_model: MakeModel, fields: dict[str, Any], expected: dict[str, Any]):
    config = resolve(make_model(GENERATION), **fields)
    assert config.default_sampling_params == expected
    assert config.generation_config["eos_token_id"] == [1, 2]


def test_generation_config_from_another_folder(make_model: MakeModel, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2}')
    config = resolve(make_model(GENERATION), generation_config=str(tmp_path))
    assert config.default_sampling_params == {"temperature": 0.2}
    assert config.max_output_tokens is None
    with pytest.raises(VLLMValidationError, match="generation_config='no-such-folder'"):
        resolve(make_model(), generation_config="no-such-folder")


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"override_generation_config": {"max_new_tokens": 5}}, 5),
        ({"generation_config": "vllm", "override_generation_config": {"max_new_tokens": 5}}, 5),
        ({"generation_config": "FOLDER"}, 7),
        ({"generation_config": "FOLDER", "override_generation_config": {"max_new_tokens": 9}}, 9),
    ],
)
def test_max_new_tokens_that_the_user_gives_bounds_requests(
    make_model: MakeModel, tmp_path: Path, fields: dict[str, Any], most: int | None
):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    arguments = {name: str(tmp_path) if value == "FOLDER" else value for name, value in fields.items()}
    config = resolve(make_model(GENERATION), **arguments)
    assert config.max_output_tokens == most
    assert config.default_sampling_params["max_tokens"] == (most or 99)


def test_a_model_s_repetition_penalty_counts(make_model: MakeModel):
    config = resolve(make_model({"repetition_penalty": 1.1, "top_k": 20}))
    assert config.default_sampling_params == {"repetition_penalty": 1.1, "top_k": 20}


def test_override_is_checked():
    with pytest.raises(VLLMValidationError, match=r"override_generation_config.*top_p"):
        default_sampling_params("auto", {}, {"top_p": 3})
    assert default_sampling_params("auto", {"top_k": 3}, {"repetition_penalty": 1.5}) == {
        "top_k": 3,
        "repetition_penalty": 1.5,
    }
    with pytest.raises(VLLMValidationError, match="'num_beams'"):
        default_sampling_params("auto", {}, {"num_beams": 4})
    with pytest.raises(VLLMValidationError, match="generation_config='vllm'"):
        default_sampling_params("auto", {"temperature": 5.0}, {})


def test_chat_template_is_text_or_a_file(make_model: MakeModel, tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    model = make_model()
    assert resolve(model, chat_template=str(file)).chat_template == "{{ messages }}"
    assert resolve(model, chat_template="{{ x }}").chat_template == "{{ x }}"
    with pytest.raises(VLLMValidationError, match="chat_template"):
        resolve(model, chat_template="no-such-file")


def test_scheduler_class_by_name(make_model: MakeModel):
    model = make_model()
    for name in ("collections.OrderedDict", "collections:OrderedDict"):
        assert resolve(model, scheduler_cls=name).scheduler_cls is OrderedDict
    for name in ("no_such_module.Scheduler", "collections.NoSuch", "os.path.join"):
        with pytest.raises(VLLMValidationError, match="scheduler_cls"):
            resolve(model, scheduler_cls=name)


def test_all_logprobs_are_the_vocabulary(make_model: MakeModel):
    model = make_model()
    assert resolve(model, max_logprobs=-1).max_logprobs == 64
    assert resolve(model, max_logprobs=1000).max_logprobs == 64
    assert resolve(model, max_logprobs=0).max_logprobs == 0


def test_sampling_settings(make_model: MakeModel):
    model = make_model()
    config = resolve(model)
    assert (config.args.logprobs_mode, config.logits_processors, config.args.stream_interval) == ("raw_logprobs", (), 1)
    assert (config.structured_outputs_config, config.args.reasoning_config) == (StructuredOutputsConfig(), None)
    reasoning = ReasoningConfig(reasoning_start_str="<a>", reasoning_end_str="</a>")
    config = resolve(model, logprobs_mode="processed_logits", stream_interval=4, reasoning_config=reasoning)
    assert (config.args.logprobs_mode, config.args.stream_interval) == ("processed_logits", 4)
    assert config.args.reasoning_config is reasoning


def unchanged(logits_sv: Any, _state: Any) -> Any:
    return logits_sv


def test_logits_processors_are_loaded(make_model: MakeModel):
    model = make_model()
    for processor in (unchanged, f"{__name__}:unchanged"):
        assert resolve(model, logits_processors=[processor]).logits_processors == (unchanged,)
    # operator.add adds the state to the logits: nothing that a step could trace
    for wrong in (3, "operator:no_such", "no_such_module:f", "operator:add"):
        with pytest.raises(VLLMValidationError, match="logits_processors") as caught:
            resolve(model, logits_processors=[wrong])
        assert caught.value.parameter == "logits_processors"


class OnHost(LogitsProcessor):
    """A class of logits processors; there is no engine to make one for."""


def test_classes_of_logits_processors_take_one_device(make_model: MakeModel):
    assert resolve(make_model(), logits_processors=[OnHost, unchanged]).logits_processors == (OnHost, unchanged)
    with pytest.raises(
        VLLMValidationError, match=r"OnHost is a class, which runs for one device, not for 2; write .*jnp"
    ):
        resolve_module._check_processors((OnHost,), 64, 2)


@pytest.mark.parametrize(
    ("requested", "platform", "dtype", "version", "expected"),
    [
        (None, "cpu", "bfloat16", (0, 12, 0), True),
        (None, "cpu", "float32", (0, 12, 0), True),
        (None, "cpu", "float32", (0, 11, 2), False),
        (None, "tpu", "bfloat16", (0, 12, 0), False),
        (False, "cpu", "bfloat16", (0, 12, 0), False),
        (False, "gpu", "float16", (0, 11, 2), False),
        (True, "cpu", "bfloat16", (0, 11, 2), True),
        (True, "cpu", "float32", (0, 12, 0), True),
        (True, "cpu", "float32", (0, 11, 2), "jax 0.12"),
        (True, "gpu", "bfloat16", (0, 12, 0), "this is a gpu"),
    ],
)
def test_batch_invariance(
    requested: bool | None, platform: str, dtype: str, version: tuple[int, ...], expected: bool | str
):
    if isinstance(expected, bool):
        assert resolve_batch_invariant(requested, platform, dtype, version, is_free=True) is expected
        return
    with pytest.raises(VLLMValidationError, match=expected) as caught:
        resolve_batch_invariant(requested, platform, dtype, version, is_free=True)
    assert caught.value.parameter == "batch_invariant"


def test_outputs_are_batch_invariant_where_that_costs_nothing(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "pallas_kernels.native.processor.current", lambda: x86("x86_64", "", dict.fromkeys(AVX512 + AVX2, True))
    )
    model = make_model(head_dim=16)
    assert resolve(model).batch_invariant
    half = resolve(model, dtype="half")
    assert (half.dtype, half.kv_groups[0].attention.implementation) == ("float32", "cpu")
    assert resolve(model, dtype="float32").batch_invariant is (jax.__version_info__ >= (0, 12))
    assert not resolve(model, dtype="float32", attention_config=AttentionConfig(backend="xla")).batch_invariant
    assert not resolve(model, batch_invariant=False).batch_invariant
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: x86("x86_64", "", {}))
    plain = resolve(model, dtype="float32")
    [group] = plain.kv_groups
    assert (group.attention.implementation, plain.batch_invariant) == (
        "xla",
        jax.__version_info__ >= (0, 12),
    )


def test_layers_that_borrow_keys_and_values_take_no_room() -> None:
    config = resolve(folder("gemma4_e2b"), skip_tokenizer_init=True)
    sizes = [(group.num_layers, group.window, group.attention.shape.head_dim) for group in config.kv_groups]
    assert sizes == [(2, 24, 16), (1, None, 32)]


def test_layers_that_attend_within_chunks() -> None:
    def sizes(**fields: Any) -> list[tuple[int, int | None]]:
        config = resolve(folder("llama4"), skip_tokenizer_init=True, **fields)
        return [(group.num_layers, group.attention_chunk) for group in config.kv_groups]

    assert sizes(block_size=16) == [(3, 32), (1, None)]
    assert sizes(max_model_len=32) == [(4, None)], "no sequence leaves its chunk"
    with pytest.raises(VLLMValidationError, match=r"block_size=128 must divide 32.*attention_chunk_size") as error:
        sizes()
    assert error.value.parameter == "block_size"
    with pytest.raises(VLLMValidationError, match=r"chunks of 32 tokens.*max_model_len to 32 or less") as error:
        sizes(block_size=16, enable_chunked_prefill=False)
    assert error.value.parameter == "enable_chunked_prefill"
    assert sizes(max_model_len=32, enable_chunked_prefill=False) == [(4, None)]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    assert default_cache_dir() == str(tmp_path)
    monkeypatch.delenv("JAXLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == str(tmp_path / "jaxllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache_dir() == str(Path.home() / ".cache" / "jaxllm")
    monkeypatch.setenv("JAXLLM_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(VLLMValidationError, match=r"no home folder for '~nobody-of-this-name/x': set .* JAXLLM_CACHE"):
        default_cache_dir()
    monkeypatch.delenv("JAXLLM_CACHE")
    monkeypatch.setenv("JAXLLM_X", "1")
    assert environment(("JAXLLM_",)) == {"JAXLLM_X": "1"}


def test_glm46v_is_known_by_its_processor(tmp_path: Path):
    """It says another second after each frame of a video than the models whose config it has."""
    shutil.copytree(media_folder("glm4v_moe"), tmp_path, dirs_exist_ok=True)

    def model_type() -> str:
        settings = media_settings(resolve(tmp_path))
        assert settings is not None
        return settings.config["model_type"]

    assert model_type() == "glm4v_moe"
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace("Glm4vImageProcessor", "Glm46VImageProcessor"))
    assert model_type() == "glm46v"


def test_the_token_is_not_shown(make_model: MakeModel):
    assert "hf_secret" not in repr(resolve(make_model(), hf_token="hf_secret"))


def test_quantization_is_the_checkpoint_s_or_a_way_to_round(make_model: MakeModel):
    awq = make_model(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True})
    assert [resolve(awq, quantization=name).quantization for name in (None, "awq")] == [None, None]
    with pytest.raises(VLLMValidationError, match=r"model config \(awq\) does not match .* argument \(gptq\)"):
        resolve(awq, quantization="gptq")
    with pytest.raises(VLLMValidationError, match=r"model config \(awq\) does not match .* argument \(int8\)"):
        resolve(awq, quantization="int8")


@pytest.mark.parametrize(("case", "name"), [("deberta_pairs", "xla"), ("qwen3_embedder", "cpu"), ("mamba", "none")])
def test_names_of_attention(case: str, name: str):
    """Scores by distance are plain XLA; only a model without attention has none."""
    args = EngineArgs(model=str(tiny_folder(case)), load_format="dummy", skip_tokenizer_init=True)
    assert args.create_engine_config().attention_names == name
