"""Start an engine core from engine arguments: check names, size the pool, load the weights."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.layout import Format

from jaxllm.config.environment import environment
from jaxllm.constraints.compiler import GrammarCompiler, make_grammar_compiler
from jaxllm.constraints.token_masks import TokenMasks
from jaxllm.engine.core import kv_tiers
from jaxllm.engine.core.early_load import EarlyLoad
from jaxllm.engine.core.engine_core import EngineCore
from jaxllm.engine.core.engine_tokenizer import load_engine_tokenizer
from jaxllm.engine.core.host_memory import keep_freed_memory
from jaxllm.engine.core.hosts.host_group import Hosts, OneHost, meet_hosts
from jaxllm.engine.core.hosts.wire import Agreement
from jaxllm.engine.core.profiler import StepProfiler
from jaxllm.engine.core.weight_updates import Updated, WeightUpdates
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.execution.host_processors import HostProcessors
from jaxllm.execution.launcher import Launcher
from jaxllm.execution.mesh import param_bytes, param_format
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.pooled_step import NO_ACTIVATION, Activation
from jaxllm.execution.programs.background import Programs, find_pace
from jaxllm.execution.programs.cache import Folders, ProgramCache, code_digest, use_cache
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import ProgramKey
from jaxllm.loading.load import init_dummy, load_params
from jaxllm.loading.read_ahead import ReadAhead
from jaxllm.lora.adapter_weights import load_adapter
from jaxllm.lora.peft import PeftAdapter, find_adapter
from jaxllm.lora.request import LoRARequest
from jaxllm.lora.store import AdapterStore
from jaxllm.lora.task_adapter import TaskAdapter, load_task_adapter
from jaxllm.models.adapters import AdapterShape
from jaxllm.models.model import Model
from jaxllm.models.params import ParamSpec, array_specs
from jaxllm.models.registry import get_family, is_built_in
from jaxllm.resolve.kv_cache_size import memory_limit, size_engine, step_config
from jaxllm.resolve.media_settings import media_settings
from jaxllm.resolve.model import checked_draft, checked_model, lent_arrays
from jaxllm.resolve.resolve_engine import resolve
from jaxllm.resolve.resolve_speculation import shared_group
from jaxllm.resolve.vllm_config import vllm_config
from jaxllm.sampling.processors import extra_args, on_host, traced, validators
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.scheduler import Scheduler
from jaxllm.selfcheck.start import disproved_ops
from jaxllm.speculation.drafter import DraftModelLimits, SpeculationSettings
from jaxllm.text.reasoning import thinking_tokens
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.utils.fork_safety import engines_home
from jaxllm.utils.log import log_phase
from jaxllm.version import __version__

if TYPE_CHECKING:
    from jaxllm.constraints.thinking import ThinkingTokens
    from jaxllm.media.items import MediaSettings
    from jaxllm.resolve.engine_args import EngineArgs
    from jaxllm.resolve.engine_config import EngineConfig
    from jaxllm.resolve.pooling_settings import PoolingSettings
    from jaxllm.usage.usage_lib import UsageContext

logger = logging.getLogger(__name__)

_XLA_VARIABLES = ("JAXLLM_CPU", "XLA_", "NPROC", "PJRT_", "LIBTPU_", "MOSAIC_")
"""The prefixes of environment variables that compiled programs depend on."""


def start_core(
    engine_args: EngineArgs,
    usage_context: UsageContext,
    on_tokenizer: Callable[[Tokenizer | None], None] = lambda _: None,
) -> tuple[EngineCore, EngineReady]:
    """Resolve engine arguments, load the model and return its core with the settings that a front end needs.

    `on_tokenizer` gets the tokenizer before the weights are loaded. Raises VLLMValidationError.
    """
    log_phase(logger, "imports")
    hosts = meet_hosts(engine_args)
    try:
        return _start_core(engine_args, usage_context, hosts, on_tokenizer)
    except BaseException as error:
        hosts.fail(error)
        raise


def _start_core(
    engine_args: EngineArgs,
    usage_context: UsageContext,
    hosts: Hosts,
    on_tokenizer: Callable[[Tokenizer | None], None],
) -> tuple[EngineCore, EngineReady]:
    config = resolve(engine_args, disproved=disproved_ops(engine_args), usage_context=usage_context)
    media = media_settings(config)
    log_phase(logger, "configuration")
    engines_home().check()  # JAX has its devices now, and a child that is forked later would share them
    prepared = prepare(config)
    try:  # meanwhile the first program is compiled
        hosts.agree(agreement(prepared))
        log_phase(logger, "shapes")
        tokenizer = load_engine_tokenizer(config.args, config.checkpoint, config.cache_dir)
        on_tokenizer(tokenizer)
        grammars = None
        if tokenizer is not None:
            grammars = make_grammar_compiler(tokenizer, config.model_config.vocab_size, config.generation_config)
        group = config.args.reasoning_config
        markers = None if group is None else (group.reasoning_start_str, group.reasoning_end_str)
        thinking = thinking_tokens(markers, tokenizer)
        log_phase(logger, "tokenizer")
        core = make_core(prepared, grammars, thinking, hosts)
    except BaseException:
        prepared.stop()
        raise
    if config.platform == "cpu":
        keep_freed_memory()
    log_phase(logger, "engine")
    return core, _ready(prepared, core, media, has_thinking_tokens=thinking is not None)


def _ready(
    prepared: Prepared, core: EngineCore, media: MediaSettings | None, *, has_thinking_tokens: bool
) -> EngineReady:
    config = prepared.config
    return EngineReady(
        vllm_config=vllm_config(config, num_blocks=prepared.num_blocks, max_model_len=config.max_model_len),
        stats=core.stats(),
        generation_config={"eos_token_id": config.generation_config.get("eos_token_id")},
        default_sampling_params=dict(config.default_sampling_params),
        max_output_tokens=config.max_output_tokens,
        chat_template=config.chat_template,
        extra_args=extra_args(traced(config.logits_processors)),
        has_validators=bool(validators(config.logits_processors)),
        has_logits_processors=bool(config.logits_processors),
        has_thinking_tokens=has_thinking_tokens,
        pooling=config.pooling,
        media=media,
        vectors={} if config.steering is None else config.steering.digests,
        num_hidden_layers=len(config.hidden_layers),
        embed_size=config.model_config.hidden_size if config.args.enable_prompt_embeds else 0,
        num_weight_bytes=config.checkpoint.num_bytes,
        weight_type=config.quantization or config.checkpoint.weight_type,
    )


def agreement(prepared: Prepared) -> Agreement:
    """Return the values that must be the same on all hosts of a model: sizes, and the sources of programs."""
    config = prepared.config
    return Agreement(prepared.num_blocks, config.max_model_len, config.max_num_seqs, _facts(prepared))


def _facts(prepared: Prepared) -> dict[str, str]:
    config, compiler = prepared.config, prepared.compiler
    settings = compiler.config, compiler.options, compiler.shapes.buckets, compiler.mesh.size, config.args.seed
    tensors = sorted((name, info.shape, info.dtype) for name, info in config.checkpoint.tensors.items())
    come_from = {
        "the versions of jaxllm, jax, jaxlib, flax and numpy": code_digest(),
        "the model": (compiler.model.facts, tensors, config.args.load_format),
        "the engine's arguments": settings,
    }
    # A function's text has its address, which differs between processes.
    texts = {name: re.sub(" at 0x[0-9a-f]+", "", str(value)) for name, value in come_from.items()}
    facts = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    if config.steering is not None:
        facts["the steering vectors"] = config.steering.digest
    if prepared.draft is None:
        return facts
    return facts | {f"{name}, of the draft model": digest for name, digest in _facts(prepared.draft).items()}


@dataclass(frozen=True)
class Prepared:
    """The part of an engine that needs no weights; its first program is being compiled, from shapes alone."""

    config: EngineConfig
    """The settings with the final max_model_len, which may be less than the user's."""
    specs: Mapping[str, ParamSpec]
    compiler: StepCompiler
    programs: Programs[ProgramKey]
    num_blocks: int
    started: float
    weights: EarlyLoad | None = None
    """The load of the weights, if it has begun."""
    draft: Prepared | None = None
    """The draft model's part, if there is one."""

    def stop(self) -> None:
        """Compile and load nothing more: there will be no engine."""
        self.programs.begin_stop()
        if self.weights is not None:
            self.weights.stop()
        self.programs.stop()
        if self.draft is not None:
            self.draft.stop()


def prepare(config: EngineConfig) -> Prepared:
    """Check names, size the pool and begin to compile; on an accelerator begin to load the weights before that.

    Raises VLLMValidationError for a checkpoint that does not fit its architecture, or a KV cache that is too small.
    """
    started = time.monotonic()
    configs = [config] if config.draft is None else [config, config.draft]
    folders = use_cache(config.cache_dir, keeps_programs=all(map(keeps_programs, configs)), platform=config.platform)
    model, specs = checked_model(config)
    draft = None if config.draft is None else checked_draft(config, config.draft, specs)

    def measure(compiler: StepCompiler) -> int:
        return ProgramCache(compiler, 0, folders, environment(_XLA_VARIABLES)).used_bytes()

    limit = memory_limit(config)
    weights = _load_early(config, specs, limit)
    with ExitStack() as begun:  # an error stops what has begun
        if weights is not None:
            begun.callback(weights.stop)
        size = size_engine(config, model, specs, limit, draft=draft, make_host=_make_host_processors, measure=measure)
        if size.refusal is not None:
            raise size.refusal
        config, num_blocks = size.config, size.num_blocks
        compiler = StepCompiler(size.steps, model, config.mesh)
        programs = _compile_ahead(
            config, compiler, num_blocks, folders, compiler.shapes.programs(), compiler.shapes.rare_programs()
        )
        begun.callback(programs.stop)
        prepared = Prepared(config, specs, compiler, programs, num_blocks, started, weights)
        if config.draft is not None and draft is not None:  # the model's own programs come first
            prepared = dataclasses.replace(prepared, draft=_prepare_draft(config.draft, *draft, num_blocks, folders))
        begun.pop_all()
    return prepared


def _load_early(config: EngineConfig, specs: Mapping[str, ParamSpec], limit: int | None) -> EarlyLoad | None:
    """Begin to load weights that are on this machine and fit into the `limit` of a device, if sizing takes a while.

    Nothing is downloaded before it is known that there is room for a KV cache, and several hosts do all in one order.
    """
    is_sized_slowly = limit is not None and param_bytes(config.mesh, specs) <= limit
    if not is_sized_slowly or not config.checkpoint.is_local or jax.process_count() > 1:
        return None
    return EarlyLoad(lambda check: _load(config, specs, check))


def _prepare_draft(
    config: EngineConfig, model: Model, specs: Mapping[str, ParamSpec], num_blocks: int, folders: Folders
) -> Prepared:
    """Begin to compile the draft model's steps, for as many blocks as the model has."""
    started = time.monotonic()
    compiler = StepCompiler(step_config(config), model, config.mesh)
    programs = _compile_ahead(config, compiler, num_blocks, folders, compiler.shapes.draft_programs())
    return Prepared(config, specs, compiler, programs, num_blocks, started)


def _compile_ahead(
    config: EngineConfig,
    compiler: StepCompiler,
    num_blocks: int,
    folders: Folders,
    keys: Sequence[ProgramKey],
    rare: Sequence[ProgramKey] = (),
) -> Programs[ProgramKey]:
    """Begin to compile programs, or to load those that are kept."""
    cache = ProgramCache(compiler, num_blocks, folders, environment(_XLA_VARIABLES))
    return Programs(
        cache.compile,
        keys,
        ahead=not config.args.enforce_eager,
        load=cache.load,
        is_kept=cache.is_kept,
        rare=rare,
        pace=find_pace(config.platform),
    )


def _make_host_processors(config: EngineConfig) -> HostProcessors | None:
    """Make the logits processors that are classes, as in vLLM before the KV cache is sized."""
    classes = on_host(config.logits_processors)
    if not classes:
        return None
    num_blocks = config.num_gpu_blocks_override or 0
    return HostProcessors(classes, vllm_config(config, num_blocks=num_blocks, max_model_len=config.max_model_len))


def make_core(
    prepared: Prepared,
    grammars: GrammarCompiler | None = None,
    thinking: ThinkingTokens | None = None,
    hosts: Hosts | None = None,
) -> EngineCore:
    """Load the weights and return the core; log one line with the model, the devices and the sizes.

    Without `grammars` there are no structured outputs, without `thinking` no thinking budgets. With `hosts` the model
    is spread over several hosts.
    """
    config, compiler, num_blocks = prepared.config, prepared.compiler, prepared.num_blocks
    hosts = hosts or OneHost()
    runner = _make_runner(prepared, hosts)
    hosts.wait_ready()
    log_phase(logger, "weights, KV cache")
    masks = TokenMasks(config.model_config.vocab_size, grammars, thinking)
    scheduler_config = _scheduler_config(prepared)
    mover = kv_tiers.make_mover(config, compiler, runner, num_blocks, scheduler_config)
    files = None if mover is None else mover.files
    scheduler = (config.scheduler_cls or Scheduler)(scheduler_config, files=files)
    device = config.mesh.devices.flat[0]
    logger.info(
        "jaxllm %s: %s (%s) on %d %s (%s) in %s, attention %s, %d KV blocks of %d tokens, context %d, %d programs; "
        "loaded in %.1f s",
        __version__,
        config.args.model,
        config.model_config.architecture,
        config.mesh.size,
        device.platform,
        device.device_kind,
        f"{config.dtype}, weights {config.quantization}" if config.quantization else config.dtype,
        config.attention_names,
        num_blocks,
        config.block_size,
        config.max_model_len,
        len(compiler.shapes.programs()),
        time.monotonic() - prepared.started,
    )
    overlap = config.async_scheduling and compiler.config.host_processors is None
    return EngineCore(
        scheduler,
        runner,
        masks,
        overlap=overlap,
        validators=validators(config.logits_processors),
        profiler=StepProfiler(config.args.profiler_config),
        adapters=None if config.adapter_shape is None else _make_store(prepared, config.adapter_shape),
        hosts=hosts,
        weights=_make_updates(prepared, runner),
        mover=mover,
    )


def _make_updates(prepared: Prepared, runner: ModelRunner) -> WeightUpdates:
    """Return what replaces the weights of a model and of its draft model, if there is one."""

    def updated(part: Prepared, launcher: Launcher) -> Updated:
        return Updated(part.config, part.compiler.model, part.specs, launcher)

    draft, launcher = prepared.draft, runner.draft_launcher
    of_draft = None if draft is None or launcher is None else updated(draft, launcher)
    return WeightUpdates(updated(prepared, runner.launcher), of_draft)


def make_launchers(prepared: Prepared) -> tuple[Launcher, Launcher | None]:
    """Load the weights and return the launchers of a model and of its draft model, if there is one."""
    load = partial(_load, prepared.config, prepared.specs)
    early = None if prepared.weights is None else prepared.weights.result
    steering = prepared.config.steering
    vectors = None if steering is None else steering.values_lvd
    model = Launcher(prepared.compiler, prepared.programs, load, early=early, vectors_lvd=vectors)
    draft = prepared.draft
    if draft is None:
        return model, None

    def load_draft() -> Any:
        return _load(draft.config, draft.specs) | lent_arrays(draft.compiler.model, model.params)

    return model, Launcher(draft.compiler, draft.programs, load_draft, features_of=model)


def _make_runner(prepared: Prepared, hosts: Hosts) -> ModelRunner:
    """Make the runner of a model, with that of its draft model."""
    model, draft = make_launchers(prepared)
    runs_draft = None if draft is None else ModelRunner(draft, broadcast=hosts.broadcast, is_draft=True)
    return ModelRunner(model, _activation(prepared.config.pooling), runs_draft, hosts.broadcast)


def _make_store(prepared: Prepared, shape: AdapterShape) -> AdapterStore:
    """Return the store that reads a model's adapters, in the order of its weights."""
    args, model = prepared.config.args, prepared.compiler.model
    arrays, slot = array_specs(prepared.specs), model.adapter_specs(shape._replace(num_slots=1))
    tasks = prepared.config.model_config.task_adapters

    def load(request: LoRARequest) -> Any:
        if tasks is not None and request.task in tasks.names:
            adapter = TaskAdapter(prepared.config.checkpoint, prepared.specs, tasks, request.task)
            return load_task_adapter(adapter, arrays, slot)
        folder = find_adapter(request.lora_path, token=args.hf_token, download_dir=args.download_dir)
        return load_adapter(PeftAdapter(folder, args.max_lora_rank), arrays, slot)

    return AdapterStore(load, prepared.config.max_cpu_loras + (0 if tasks is None else len(tasks.names)))


def _activation(pooling: PoolingSettings | None) -> Activation:
    """Return the last operation on a pooling model's outputs."""
    if pooling is None:
        return NO_ACTIVATION
    return Activation(pooling.activation, pooling.logit_mean, pooling.logit_sigma, pooling.token_outputs)


def keeps_programs(config: EngineConfig) -> bool:
    """Return whether programs can be kept on disk by their sources.

    They can if they contain no code from outside jaxllm, and run from disk, which no interpreted kernel does; those of
    an accelerator are not known to where a mesh spans hosts.
    """
    is_ours = not config.logits_processors and is_built_in(config.model_config.architecture)
    is_known = config.platform == "cpu" or jax.process_count() == 1
    return is_ours and is_known and not any(group.attention.interpret for group in config.kv_groups)


def _load(config: EngineConfig, specs: Mapping[str, ParamSpec], check: Callable[[], None] = lambda: None) -> Any:
    """Return the parameters; `check`, which is called before each array, may end it by raising."""
    arrays = array_specs(specs)

    def format_for(path: str) -> jax.sharding.Sharding | Format:
        check()
        return param_format(config.mesh, arrays[path])

    if config.args.load_format == "dummy":
        return init_dummy(specs, config.args.seed, format_for=format_for)
    config.checkpoint.fetch()
    args = config.args
    ahead = ReadAhead(args.num_reading_threads, args.safetensors_prefetch_block_size)
    progress = args.use_tqdm_on_load
    params = load_params(specs, config.checkpoint, format_for=format_for, progress=progress, read_ahead=ahead)
    _warn_of_own_head(config, params)
    return params


def _warn_of_own_head(config: EngineConfig, params: Mapping[str, Any]) -> None:
    """Warn if config.json ties the output head to the embedding, and the checkpoint has another head."""
    if not {"embed", "lm_head"} <= params.keys() or params["lm_head"]["table"] is params["embed"]["table"]:
        return
    family = get_family(config.model_config.architecture)
    if not family.is_wrapper and family.read_config(config.hf_config).tie_word_embeddings:
        logger.warning(
            "config.json ties the output head to the embedding, but the checkpoint has an lm_head.weight that differs: "
            "it is used, as in HF Transformers. tie_word_embeddings=false in config.json would say so."
        )


def _speculation(config: EngineConfig, draft: Prepared | None) -> SpeculationSettings | None:
    """Return how tokens are guessed ahead, with the limits of the draft model, if there is one."""
    if config.speculation is None or draft is None:
        return config.speculation
    group = shared_group(config)
    assert group is not None  # `resolve` has checked it
    limits = DraftModelLimits(
        max_num_batched_tokens=draft.config.max_num_batched_tokens,
        max_model_len=draft.config.max_model_len,
        row_alignment=draft.compiler.config.row_alignment,
        group=group,
        num_groups=len(draft.config.kv_groups),
        vocab_size=config.model_config.vocab_size,
        shift=1 if draft.config.reads is not None else 0,
    )
    return dataclasses.replace(config.speculation, draft_model=limits)


def _scheduler_config(prepared: Prepared) -> SchedulerConfig:
    config, args, compiler = prepared.config, prepared.config.args, prepared.compiler
    layout = compiler.config.kv_layout
    sizes = layout.num_blocks(prepared.num_blocks)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        row_alignment=compiler.config.row_alignment,
        groups=tuple(group.config(size) for group, size in zip(config.kv_groups, sizes, strict=True)),
        num_state_slots=layout.num_slots,
        num_host_blocks=kv_tiers.num_host_blocks(config.args.kv_offloading_size, compiler, prepared.num_blocks),
        root_hash=kv_tiers.root_hash(config, compiler),
        num_media_rows=compiler.config.num_media_rows,
        # Only pictures are seen from both sides, and an engine that takes prompts of embeddings takes none.
        sees_both_sides=config.model_config.sees_both_sides and not args.enable_prompt_embeds,
        num_clip_blocks=layout.num_cross_blocks(prepared.num_blocks),
        clip_blocks=layout.clip_blocks,
        num_adapter_slots=config.adapter_shape.num_slots if config.adapter_shape else 0,
        enable_prefix_caching=config.enable_prefix_caching and not _keys_depend_on_the_prompt(config),
        policy=args.scheduling_policy,
        step_target=config.step_target,
        short_prompts_pass=config.usage_context.is_online,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        whole_tasks=frozenset(config.pooling.runs_whole_tasks if config.pooling else ()),
        max_rows=compiler.shapes.max_rows,
        keys_depend_on_prompt=_keys_depend_on_the_prompt(config),
        speculation=_speculation(config, prepared.draft),
        tracks_all_tokens=bool(config.logits_processors),
        kv_cache_metrics_sample=args.kv_cache_metrics_sample if args.kv_cache_metrics else None,
    )


def _keys_depend_on_the_prompt(config: EngineConfig) -> bool:
    """Return whether tokens have other keys in a longer prompt, as with dynamic RoPE, and cannot share them."""
    return any(rope.depends_on_length(config.max_model_len) for rope in config.model_config.ropes)
