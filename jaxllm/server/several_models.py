"""Give an application several models, which are loaded as requests ask for them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from functools import partial

from starlette.datastructures import State as AppState

from jaxllm.config.server_arguments import MAX_QUEUED
from jaxllm.engine.client.fork_server import ForkServer
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.app import begin_state, counted_twice, sources_of
from jaxllm.server.model_settings import ModelSettings, max_loaded
from jaxllm.server.models.entry import ModelEntry
from jaxllm.server.models.loader import EngineLoader
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.models.size import memory_bytes, weight_bytes
from jaxllm.server.operations.model_metrics import ModelCollector
from jaxllm.server.operations.prometheus import CoreProcesses, EngineCollector
from jaxllm.server.served_model import ServedModel


def init_models_state(
    settings: Iterable[ModelSettings], state: AppState, args: argparse.Namespace, forks: ForkServer
) -> ServedModels[ServedModel]:
    """Give an application the models of `settings`, and return them. None is loaded; `forks` starts their cores.

    Raises VLLMValidationError for a model that is larger than all may be together.
    """
    begin_state(state, args)
    entries = [_entry(each, state, forks) for each in settings]
    for entry in entries:
        if args.models_memory is not None and (entry.num_bytes or 0) > args.models_memory:
            message = (
                f"the model {entry.name!r} takes about {(entry.num_bytes or 0) / 2**30:.1f} GiB, more than the "
                f"{args.models_memory / 2**30:.1f} GiB of models_memory: raise it, or lower kv_cache_memory_bytes."
            )
            raise VLLMValidationError(message, parameter="models_memory", value=args.models_memory)
    models = state.models = ServedModels(entries, max_loaded=max_loaded(args), max_bytes=args.models_memory)

    def engines() -> list[tuple[Mapping[str, str], AsyncLLM]]:
        return [({"model_name": entry.name}, record.engine) for entry, record in models.records()]

    prefix = state.server_args.metrics_prefix
    for collector in (EngineCollector(engines, prefix), CoreProcesses(engines), ModelCollector(models, prefix)):
        state.registry.register(collector)
    return models


def _entry(settings: ModelSettings, state: AppState, forks: ForkServer) -> ModelEntry[ServedModel]:
    engine_args = settings.engine_args
    num_weight_bytes = weight_bytes(engine_args)
    return ModelEntry(
        settings.names,
        EngineLoader(engine_args, partial(_make, settings, state), forks),
        source=engine_args.model,
        sources=sources_of(engine_args.model, engine_args.tokenizer, settings.args),
        adapters=settings.adapters,
        num_bytes=memory_bytes(engine_args, num_weight_bytes),
        num_weight_bytes=num_weight_bytes,
        max_waiting=engine_args.max_num_queued_reqs or MAX_QUEUED,
    )


async def _make(
    settings: ModelSettings, state: AppState, entry: ModelEntry[ServedModel], engine: AsyncLLM
) -> ServedModel:
    """Make what answers a model's requests by way of its engine, with the adapters and counts that it has had
    before.
    """
    before = entry.record
    if before is not None:
        before.engine.get_metrics()  # takes in the last number of compiled programs
        engine.front.metrics.go_on_from(before.engine.front.metrics)
    record = await ServedModel.make(
        engine,
        engine.vllm_config,
        settings.args,
        state.kept_responses,
        partial(counted_twice, state.load, entry),
        is_quiet=before is not None,
    )
    if before is not None:
        await record.models.add_others(engine, before.models)
    return record
