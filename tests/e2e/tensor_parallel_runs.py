"""Run one model on 1, 2, 4 and 8 virtual CPU devices and write down what came out, for test_tensor_parallel.py.

A process of its own, because the number of devices is fixed once JAX runs. Arguments: a file to write, a checkpoint,
its tokenizer, and SmolLM2.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.check.hlo import count_collectives
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.mesh import replicated_params
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.step import StepShape
from jaxllm.models import ParamSpec
from pallas_kernels.weights.held import Quantized
from tests.e2e.adapter_data import CASES as ADAPTED
from tests.e2e.adapter_data import SETTINGS, generate, golden_of, logprobs_of, prompt_of, request
from tests.e2e.embeds_goldens import read_golden as read_embeds_golden
from tests.e2e.guessing import Guesses, head_config
from tests.e2e.inside import core_of
from tests.e2e.media_goldens import folder as media_folder
from tests.e2e.media_goldens import logprobs_of as media_logprobs
from tests.e2e.media_goldens import prompt_of as media_prompt
from tests.e2e.media_goldens import read_golden
from tests.e2e.media_rows import made_rows
from tests.e2e.sampling_cases import CASES, others, tilt
from tests.e2e.tiny_engine import Job, RecordingScheduler, run_together, tiny_llm
from tests.loading.files import write_folder
from tests.loading.mxfp4_files import GPT_OSS, quantized, read_tensors
from tests.loading.mxfp4_files import QUANTIZED as MXFP4
from tests.models.clips import RATE
from tests.models.heads import model_folder
from tests.models.heads import read_goldens as read_head_goldens
from tests.models.tiny import folder, read_goldens
from tests.models.whisper_cases import read_case, save_checkpoint

NUM_DEVICES = 8
QUANTIZED_DATA = Path(__file__).parents[1] / "data" / "quantized"
SIZES = (1, 2, 4, 8)
FAMILIES = {
    "gemma3": 2,  # windows, two RoPE tables
    "olmo2": 4,  # norms of heads together
    "qwen3": 4,  # norms of heads alone
    "gpt2": 2,  # q, k and v in one tensor, biases, learned positions
    "qwen3_moe": 2,  # experts
    "gpt_oss": 2,  # experts with biases, sinks
    "gemma4_moe": 2,  # experts beside an MLP, heads of two sizes
    "deepseek_v2_lite": 2,  # latents, which each device has
    "deepseek_v3": 2,  # latents of queries too
    "glm_moe_dsa": 2,  # indexers, which each device has
    "qwen3_next": 2,  # recurrent states of heads, a gate on attention
    "kimi_linear": 2,  # states with a decay for each number of a key, beside latents
    "bailing_hybrid": 2,  # the same with projections that are not divided in two; gates on latents' heads
    "lfm2": 2,  # recurrent states of channels
    "granite4": 2,  # state spaces, whose heads share groups; a shared expert
    "nemotron3": 2,  # layers of one part, experts of latents
    "jamba": 2,  # a projection that sums over the channels of all devices, within a recurrent layer
    "mamba": 2,  # the same without attention
    "mamba2": 2,
    "falcon_h1": 2,  # attention beside a recurrent state
    "lfm3": 2,  # a gate for each head
    "gemma4_e2b": 2,  # layers that borrow keys, layers with inputs of their own
    "phi": 2,  # LayerNorms, attention beside the MLP, a bias of the head
    "cohere": 2,  # norms with scales of each head
    "hunyuan_moe": 2,  # norms after the rotation
}
"""Tiny checkpoints, with a vocabulary of one tile, and the number of devices that they run on."""
DEALT = {
    "kimi_k2": (2, 2),  # a shared expert, groups of experts
    "llama4": (2, 1),  # routers that scale inputs
    "gpt_oss": (2, 1),  # biases
    "gemma4_moe": (2, 1),  # experts beside an MLP
    "nemotron3": (2, 1),  # experts of latents
    "deepseek_v32": (2, 1),  # indexers, which each device has
    "kimi_linear": (2, 1),  # states whose heads are dealt out beside experts
}
"""Tiny checkpoints whose experts are dealt out, and the sizes of the mesh's expert axis and model axis."""
WHOLE_EXPERTS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
DEALT_ADAPTED = "deepseek_v2_lite"
"""A tiny checkpoint with experts and adapters."""
QUANTIZED = (
    "awq", "gptq_4bit_asym_act_order", "gptq_3bit", "ct_w8a16_asym", "ct_nvfp4", "fp8_blocks", "bnb_nf4",
)  # fmt: skip
"""Tiny checkpoints of formats that store different arrays."""
MEDIA_CASES = ("qwen2_vl", "qwen3_vl", "gemma3")
"""Tiny checkpoints that see: three positions, further slices of rows, pictures that are attended to from both sides."""
EMBEDS_CASES = ("llama3_tied", "gemma3", "granite")
"""Tiny checkpoints that take prompts of embeddings, without a factor for them, and with one before and after."""
HEAD_CASES = ("eagle3", "mtp_deepseek_v3")
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "block_size": 16,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "num_gpu_blocks_override": 8,
    "max_logprobs": 5,
}


def feature_jobs() -> list[Job]:
    """Return requests that use every field of SamplingParams, after longer ones: more than the blocks hold.

    Those are preempted in any case; beside requests that wait for grammars that depends on the grammars' time.
    """
    cases = [case.job() for case in CASES.values() if not case.is_refused]
    jobs = [*plain_jobs(), *cases, *others()]
    for job in jobs:  # the whole vocabulary would be too much to write down
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(job.params, name) == -1:
                setattr(job.params, name, 5)
    return jobs


def plain_jobs() -> list[Job]:
    """Return requests of the plain program: greedy ones, and sampled ones with seeds."""
    lengths = (3, 17, 29, 41, 8, 23)
    return [
        Job(
            [(11 * i + length) % 7000 + 300 for i in range(length)],
            SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=16, ignore_eos=True, detokenize=False),
        )
        for index, length in enumerate(lengths)
    ]


def truncated_jobs() -> list[Job]:
    """Return requests of the truncated program, with plain ones beside them."""
    jobs = plain_jobs()
    for job, fields in zip(jobs, ({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}), strict=False):
        job.params.temperature = 0.9
        for name, value in fields.items():
            setattr(job.params, name, value)
    return [*jobs, *plain_jobs()[:2]]


def run(size: int, model: str, tokenizer: str) -> dict[str, Any]:
    """Run everything on `size` devices: plain and truncated programs in one engine, full ones in another."""
    arguments = ARGUMENTS | {"tokenizer": tokenizer} | ({"tensor_parallel_size": size} if size > 1 else {})
    with tiny_llm(model, **arguments) as (llm, scheduler):
        truncated = run_together(llm, truncated_jobs())
        plain = _run(llm, scheduler, plain_jobs())
    with tiny_llm(model, logits_processors=[tilt], **arguments) as (llm, scheduler):
        features, params = _run(llm, scheduler, feature_jobs()), _params(_runner(llm))
    return {"plain": plain, "truncated": {"outputs": [*map(_shown, truncated)]}, "features": features, "params": params}


def _run(llm: LLM, scheduler: RecordingScheduler, jobs: Sequence[Job]) -> dict[str, Any]:
    outputs, runner = run_together(llm, jobs), _runner(llm)
    again = [output for _ in range(2) for output in run_together(llm, jobs[1:2])]
    return {
        "outputs": [_shown(output) for output in (*outputs, *again)],
        "num_preemptions": scheduler.stats().num_preemptions,
        "most_chunks": max(scheduler.num_prompt_chunks(output.request_id) for output in outputs),
        "cached": [output.num_cached_tokens for output in again],
        "pool": [array.sharding.shard_shape(array.shape) for array in jax.tree.leaves(runner.launcher.pools)],
        "collectives": list(_collectives(runner)),
    }


def _runner(llm: LLM) -> ModelRunner:
    runner = core_of(llm)._runner
    assert runner is not None
    return runner


def against_golden(case: str, **engine: Any) -> list[dict[str, list[int]]]:
    """Return HF's tokens and ours for each prompt of a tiny checkpoint, with the attention that all platforms have."""
    goldens = read_goldens(case)
    greedy = SamplingParams(temperature=0, max_tokens=len(goldens[0].tokens), ignore_eos=True, detokenize=False)
    arguments: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_gpu_blocks_override": 17}
    with tiny_llm(case, attention_config={"backend": "xla"}, **arguments, **engine) as (llm, _):
        outputs = run_together(llm, [Job(golden.prompt.tolist(), greedy) for golden in goldens])
    pairs = zip(goldens, outputs, strict=True)
    return [{"expected": golden.tokens.tolist(), "got": list(out.outputs[0].token_ids)} for golden, out in pairs]


def with_experts(case: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return what a checkpoint gives whose experts are dealt out: as it is, and rounded to int8 on one device too, if
    each expert is also cut.
    """
    if sizes[1] == 1:
        return {"golden": against_golden(case, enable_expert_parallel=True, tensor_parallel_size=sizes[0])}
    mesh = _mesh(jax.devices()[: math.prod(sizes)], sizes[::-1], ("model", "expert"))
    rounded = [as_quantized(folder(case), quantization="int8", **engine) for engine in ({}, {"mesh": mesh})]
    return {"golden": against_golden(case, mesh=mesh), "int8": rounded}


def with_packed_experts() -> list[list[Any]]:
    """Return what gpt-oss with experts in MXFP4 gives on one device, and with whole experts on each of two."""
    stored, _ = quantized(read_tensors(GPT_OSS))
    config = json.loads((GPT_OSS / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as path:
        checkpoint = write_folder(Path(path), stored, config | MXFP4)
        return [as_quantized(checkpoint, **engine) for engine in ({}, WHOLE_EXPERTS)]


def with_adapters(case: str, **engine: Any) -> dict[str, Any]:
    """Return HF's tokens with an adapter and ours, and the largest difference of log-probabilities."""
    golden = golden_of("all", case)
    with LLM(str(folder(case)), **engine, **SETTINGS) as llm:
        output, _ = generate(llm, [prompt_of(case)] * 2, [request("all", case), None])
    error = float(np.abs(logprobs_of(output) - golden.logprobs).max())
    return {"expected": golden.tokens, "got": list(output.outputs[0].token_ids), "error": error}


def with_pictures(family: str, **engine: Any) -> list[dict[str, Any]]:
    """Return HF's tokens and ours for a prompt with two pictures, for the same with the rows that the tower has made,
    and for one with a picture, and the largest difference of log-probabilities.
    """
    one, two = read_golden(family, "one"), read_golden(family, "two")
    greedy = SamplingParams(temperature=0, max_tokens=len(one.tokens), ignore_eos=True, logprobs=-1)
    arguments: dict[str, Any] = {"max_num_batched_tokens": 320, "max_num_seqs": 8, "num_gpu_blocks_override": 65}
    arguments |= {"skip_tokenizer_init": False, "max_model_len": 320, "cudagraph_capture_sizes": [8]}
    arguments |= {"max_logprobs": -1, "enable_mm_embeds": True, **engine}
    with tiny_llm(media_folder(family), **arguments) as (llm, scheduler):
        prompt = media_prompt(family, two)
        outputs = llm.generate(prompt, greedy, use_tqdm=False)
        data = {"image": made_rows(llm, scheduler, family, two)}
        again = TokensPrompt(prompt_token_ids=prompt["prompt_token_ids"], multi_modal_data=data)
        outputs += llm.generate([again, media_prompt(family, one)], greedy, use_tqdm=False)
    return [
        {
            "expected": golden.tokens.tolist(),
            "got": list(output.outputs[0].token_ids),
            "error": float(np.abs(media_logprobs(output) - golden.logprobs).max()),
        }
        for golden, output in zip((two, two, one), outputs, strict=True)
    ]


def with_embeds(case: str, **engine: Any) -> dict[str, Any]:
    """Return HF's tokens and ours after random embeddings, the largest difference of log-probabilities, and whether a
    prompt of its tokens' embeddings gives what its tokens give, to the bit.
    """
    golden = read_embeds_golden(case)
    prompts: Any = [golden.embeds, golden.embedded]
    greedy = SamplingParams(temperature=0, max_tokens=len(golden.tokens), ignore_eos=True, logprobs=-1)
    arguments = ARGUMENTS | {"skip_tokenizer_init": True, "max_logprobs": -1, "enable_prompt_embeds": True, **engine}
    with tiny_llm(case, **(arguments | {"num_gpu_blocks_override": 33})) as (llm, _):
        made = llm.generate([{"prompt_embeds": rows} for rows in prompts], greedy, use_tqdm=False)
        [known] = llm.generate(TokensPrompt(prompt_token_ids=golden.ids.tolist()), greedy, use_tqdm=False)
    random, same = made
    return {
        "expected": golden.tokens.tolist(),
        "got": list(random.outputs[0].token_ids),
        "error": float(np.abs(media_logprobs(random) - golden.logprobs).max()),
        "is_same": same.outputs[0] == known.outputs[0],
    }


def with_clips(case: str, **engine: Any) -> list[dict[str, Any]]:
    """Return HF's tokens and ours for clips that a decoder attends to, and the difference of log-probabilities."""
    goldens = read_case(case).goldens
    greedy = SamplingParams(temperature=0, max_tokens=len(goldens[0].tokens), ignore_eos=True, logprobs=1)
    prompts: Any = [
        {"prompt_token_ids": golden.prompt.tolist(), "multi_modal_data": {"audio": (golden.clip, RATE)}}
        for golden in goldens
    ]
    with tempfile.TemporaryDirectory() as path:
        arguments: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_gpu_blocks_override": 9}
        with LLM(save_checkpoint(case, Path(path)), dtype="float32", block_size=16, **arguments, **engine) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
    results = []
    for golden, output in zip(goldens, outputs, strict=True):
        tokens, expected = list(output.outputs[0].token_ids), golden.logprobs[len(golden.prompt) - 1 :].max(axis=-1)
        logprobs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs or [], tokens, strict=True)]
        error = float(np.abs(np.array(logprobs) - expected).max())
        results.append({"expected": golden.tokens.tolist(), "got": tokens, "error": error})
    return results


def with_head(case: str, size: int) -> list[dict[str, list[int]]]:
    """Return what HF's parts guess after each sequence of a draft head's goldens, and what the head guesses."""
    arguments: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 33}
    arguments["speculative_config"] = head_config(case)
    goldens = read_head_goldens(case)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with tiny_llm(str(model_folder(case)), tensor_parallel_size=size, **arguments) as (llm, scheduler):
        guesses = Guesses(scheduler)
        for golden in goldens:  # alone, the first guesses are of what follows a request's second token
            run_together(llm, [Job(golden.sequence[:-2].tolist(), params)])
    got = [guesses.seen[tuple(golden.sequence.tolist())] for golden in goldens]
    return [{"expected": each.guesses.tolist(), "got": own} for each, own in zip(goldens, got, strict=True)]


def in_int8(size: int, model: str) -> list[Any]:
    """Return what requests give with quantized weights; those of one device are multiplied by its own kernel."""
    changes = {"tensor_parallel_size": size, "quantization": "int8", "skip_tokenizer_init": True}
    with tiny_llm(model, **(ARGUMENTS | changes)) as (llm, _):
        return [_shown(output) for output in run_together(llm, plain_jobs())]


def as_quantized(checkpoint: Path, **engine: Any) -> list[Any]:
    """Return the number of quantized weights, and the outputs of requests with them."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=5)
    jobs = [Job([(7 * i + length) % 90 + 3 for i in range(length)], params) for length in (3, 17, 30)]
    changes = {"skip_tokenizer_init": True, "dtype": "float32"}
    with tiny_llm(str(checkpoint), **(ARGUMENTS | changes | engine)) as (llm, _):
        kept = sum(isinstance(leaf, Quantized) for leaf in _leaves(_runner(llm).launcher.params))
        return [kept, *(_shown(output) for output in run_together(llm, jobs))]


def _leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def alone_and_together(size: int, model: str, quantization: str | None = None) -> list[list[Any]]:
    """Return what requests give in bfloat16, one after the other and then all at once, in other buckets."""
    jobs = plain_jobs()
    for job in jobs:
        job.params.logprobs = 5
    changes = {"tensor_parallel_size": size, "dtype": "bfloat16", "max_num_batched_tokens": 16}
    changes["quantization"] = quantization
    with tiny_llm(model, **(ARGUMENTS | {"skip_tokenizer_init": True} | changes)) as (llm, _):
        assert llm.model_config.batch_invariant
        alone = [output for job in jobs for output in run_together(llm, [job])]
        return [[_shown(output) for output in outputs] for outputs in (alone, run_together(llm, jobs))]


def _params(runner: ModelRunner) -> dict[str, Any]:
    """Return the bytes of parameters: per device, in all, and of those that are not in equal parts on all devices."""
    mesh, specs = runner.compiler.mesh, runner.compiler.model.specs.param_specs()
    shards = [shard for array in jax.tree.leaves(runner.launcher.params) for shard in array.addressable_shards]
    by_device = [sum(each.data.nbytes for each in shards if each.device == device) for device in mesh.devices.flat]
    repeated = {path: spec for path, spec in specs.items() if spec.repeats > 1}
    return {
        "by_device": by_device,
        "total": sum(_bytes(spec) // spec.repeats for spec in specs.values()),
        "replicated": {path: _bytes(specs[path]) for path in replicated_params(mesh, specs)},
        "repeated": {path: _bytes(spec) // mesh.size for path, spec in repeated.items()},
    }


def _bytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _collectives(runner: ModelRunner) -> Iterator[dict[str, Any]]:
    """Yield the collectives of each compiled step."""
    for key, program in runner.programs._done.items():
        if isinstance(key, StepShape):
            counts = {each.kind: each.count for each in count_collectives(program.as_text())}
            yield {"sampling": key.sampling.value, "counts": counts}


def _shown(output: RequestOutput) -> dict[str, Any]:
    prompt = output.prompt_logprobs
    return {
        "prompt_logprobs": None if prompt is None else [_values(position) for position in prompt],
        "prompt_token_id_logprobs": None if (asked := output.prompt_token_id_logprobs) is None else asked.tolist(),
        "outputs": [
            {
                "token_ids": list(each.token_ids),
                "ended": [each.finish_reason, each.stop_reason],
                "text": each.text,
                "logprobs": None if each.logprobs is None else [_values(position) for position in each.logprobs],
            }
            for each in output.outputs
        ],
    }


def _values(position: Any) -> list[tuple[int, float]] | None:
    return None if position is None else [(token, entry.logprob) for token, entry in position.items()]


def refusals(smollm2: str, model: str) -> dict[str, dict[str, Any]]:
    """Return the errors of settings that cannot work; all are refused before weights are loaded."""
    devices = jax.devices()
    tried: dict[str, dict[str, Any]] = {
        "heads": {"model": smollm2, "tensor_parallel_size": 2},
        "too few": {"model": model, "tensor_parallel_size": NUM_DEVICES + 1},
        "axes": {"model": model, "mesh": _mesh(devices[:4], (2, 2), ("model", "data"))},
        "no model axis": {"model": model, "mesh": _mesh(devices[:2], (2,), ("data",))},
        "both": {"model": model, "mesh": _mesh(devices[:2], (2,), ("model",)), "tensor_parallel_size": 4},
        "not a mesh": {"model": model, "mesh": devices[:2]},
    }
    refused = {}
    for name, arguments in tried.items():
        try:
            LLM(**arguments, skip_tokenizer_init=True)
        except VLLMValidationError as error:
            refused[name] = {"message": str(error), "parameter": error.parameter}
    return refused


def _mesh(devices: Sequence[Any], shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, devices=devices)


def main(out: str, model: str = "", tokenizer: str = "", smollm2: str = "") -> None:
    """Write what the families give to a file of JSON, or else, with a model, everything besides."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    assert jax.device_count() == NUM_DEVICES
    results = others_of(model, tokenizer, smollm2) if model else families()
    Path(out).write_text(json.dumps(results))


def families() -> dict[str, Any]:
    """Return what each tiny checkpoint gives."""
    return {case: against_golden(case, tensor_parallel_size=size) for case, size in FAMILIES.items()}


def others_of(model: str, tokenizer: str, smollm2: str) -> dict[str, Any]:
    """Return what else there is to compare, by its name."""
    results: dict[str, Any] = {"refusals": refusals(smollm2, model)}
    results["experts"] = {case: with_experts(case, sizes) for case, sizes in DEALT.items()}
    results["adapters"] = {case: with_adapters(case, tensor_parallel_size=2) for case in ADAPTED}
    results["experts with adapters"] = with_adapters(DEALT_ADAPTED, **WHOLE_EXPERTS)
    results["packed experts"] = with_packed_experts()
    results["heads"] = {case: with_head(case, 2) for case in HEAD_CASES}
    results["pictures"] = {case: with_pictures(case, tensor_parallel_size=2) for case in MEDIA_CASES}
    results["embeds"] = {case: with_embeds(case, tensor_parallel_size=2) for case in EMBEDS_CASES}
    results["clips"] = with_clips("base", tensor_parallel_size=2)
    results["invariance"] = {str(method): alone_and_together(4, model, method) for method in (None, "int8")}
    results["int8"] = {size: in_int8(size, model) for size in (1, 4)}
    results["quantized"] = {
        case: {size: as_quantized(QUANTIZED_DATA / case, tensor_parallel_size=size) for size in (1, 2)}
        for case in QUANTIZED
    }
    results["runs"] = {size: run(size, model, tokenizer) for size in SIZES}
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
