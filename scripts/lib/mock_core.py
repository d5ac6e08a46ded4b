"""An engine core without a model: it emits the tokens of a text, at a chosen rate, to a real front end.

Tests and benchmarks of front ends use it, where a model would only cost time. The engine's arguments are resolved as a
real core's are, so that tokenizer, vocabulary and limits are a real model's; no weights are read. Each request gets the
words of this repository's licence, from a position that its seed gives, until max_tokens or a stop token id. With
`--replies FILE` some prompts get a fixed answer: FILE is a JSON list of {"prompt": a part of the prompt's text,
"reply": the answer's text}; the first match counts.
With `--step-ms` the core is a real one, with its scheduler and its model runner, on the device of lib/mock_device.py.
It runs behind a front end in a thread (`start_mock` for `RemoteCore.in_thread`), or in a process of its own
(`start_mock_process`), where this file is the program that the front end starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.core_messages import (
    Alignment,
    Clip,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestError,
    SchedulerStats,
    TokenLogprobs,
    no_tokens,
    split,
)
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.core.core_process import serve
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.start import start_in_process
from jaxllm.engine.transport.core_client import SLEEPING_PARTS
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.store import AdapterStore, HoldsAdapters
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.usage.usage_lib import UsageContext

if TYPE_CHECKING:
    from jaxllm.engine.core.engine_core import EngineCore
    from jaxllm.resolve.engine_config import EngineConfig
    from lib.mock_device import DeviceClock

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


class _Stream:
    """A sequence that gets tokens."""

    __slots__ = ("entered", "first_token", "num_tokens", "reply", "request", "scheduled", "stop_ids")

    def __init__(self, request: EngineCoreRequest, reply: list[int] | None) -> None:
        self.request = request
        self.first_token = request.seed
        self.reply = reply
        """The answer's tokens; None for the default text."""
        self.num_tokens = 0
        self.stop_ids = frozenset(request.sampling_params.stop_token_ids or ())
        self.entered = time.monotonic()
        self.scheduled = 0.0


class Replies:
    """The fixed answers to some prompts."""

    def __init__(self, path: str, tokenizer: Tokenizer) -> None:
        """Read the file of `--replies`."""
        self._tokenizer = tokenizer
        replies = json.loads(Path(path).read_text(encoding="utf-8"))
        texts = tokenizer.encode([each["reply"] for each in replies], add_special_tokens=False)
        ends = [tokenizer.eos_token_id or 0]  # a stop token is not shown
        self._replies = [(each["prompt"], ids + ends) for each, ids in zip(replies, texts, strict=True)]

    def find(self, prompt_token_ids: list[int]) -> list[int] | None:
        """Return the tokens of the fixed answer to a prompt, or None."""
        prompt = self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        return next((reply for part, reply in self._replies if part in prompt), None)


class MockCore(HoldsAdapters):
    """A core that gives each running sequence one token per step; the first `max_num_seqs` sequences run."""

    is_compiling = False
    is_warm = True
    is_paused = False
    num_compiled = 0
    weight_version: str | int = "default"

    def __init__(
        self,
        tokens: list[int],
        *,
        max_num_seqs: int,
        num_blocks: int,
        tokens_per_second: float | None = None,
        replies: Replies | None = None,
    ) -> None:
        """Give each stream `tokens`, repeated, at a number of tokens per second; None is as fast as possible."""
        self._adapters = AdapterStore(lambda request: request.lora_name, 64)
        self._tokens = tokens
        self._replies = replies
        self._distinct = list(dict.fromkeys(self._tokens))
        self._max_num_seqs, self._num_blocks = max_num_seqs, num_blocks
        self._interval = 0.0 if tokens_per_second is None else 1.0 / tokens_per_second
        self._next = 0.0
        """The time.monotonic() before which the next step does not end."""
        self._streams: dict[str, _Stream] = {}
        self._reports: list[EngineCoreOutput] = []
        self._num_steps = self._num_tokens = 0
        self._asleep: set[str] = set()
        """The parts that sleep."""

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do or to report."""
        return bool(self._streams or self._reports)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; a request that needs a model ends with an error."""
        sequences = split(request)
        if self._asleep:
            for sequence in sequences:
                self.fail(sequence.request_id, RequestError("internal", "The engine sleeps."))
            return
        try:
            self.check(request.sampling_params)
        except VLLMValidationError as error:
            for sequence in sequences:
                self.fail(sequence.request_id, RequestError("invalid", str(error), error.parameter))
            return
        reply = self._replies and self._replies.find(request.prompt_token_ids)
        self._streams.update((sequence.request_id, _Stream(sequence, reply)) for sequence in sequences)

    def check(self, params: SamplingParams, seconds: float | None = None) -> None:
        """Raise VLLMValidationError for params that need a model: scored prompts and structured outputs."""
        del seconds
        needs_grammar = () if self._replies else ("structured_outputs",)
        for name in (*needs_grammar, "prompt_logprobs", "prompt_logprob_token_ids"):
            if getattr(params, name) is not None:
                raise VLLMValidationError(f"{name} needs a model, which a mock core has not.", parameter=name)

    def fail(self, sequence_id: str, error: RequestError) -> None:
        """End a sequence with an error, whether or not the core has it."""
        self._streams.pop(sequence_id, None)
        self._reports.append(EngineCoreOutput(request_id=sequence_id, finish_reason="error", error=error))

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            if self._streams.pop(sequence_id, None) is not None:
                self._reports.append(EngineCoreOutput(request_id=sequence_id, finish_reason="abort"))

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Do nothing: there are no blocks to keep."""

    def step(self) -> EngineCoreOutputs:
        """Wait for the time of the next tokens and return them."""
        if self._interval:
            now = time.monotonic()
            # A core that was idle, or is too slow, does not catch up.
            self._next = max(now, self._next + self._interval) if self._next > now - self._interval else now
            time.sleep(self._next - now)
        outputs, self._reports = self._reports, []
        running = list(self._streams.values())[: self._max_num_seqs]
        next_tokens = no_tokens()
        for stream in running:
            output = self._advance(stream)
            if stream.num_tokens == 1 or output.finish_reason or output.new_logprobs:
                outputs.append(output)
            else:
                next_tokens.sequence_ids.append(output.request_id)
                next_tokens.token_ids.extend(output.new_token_ids)
        self._num_steps += 1
        self._num_tokens += len(running)
        return EngineCoreOutputs(
            outputs=outputs, stats=self.stats(), timestamp=time.monotonic(), next_tokens=next_tokens
        )

    def launch_ahead(self) -> None:
        """Do nothing: there is no device."""

    def stats(self) -> SchedulerStats:
        """Return how many sequences run and wait; each running one counts as one block."""
        num_running = min(len(self._streams), self._max_num_seqs)
        return SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=len(self._streams) - num_running,
            num_blocks=self._num_blocks,
            num_blocks_in_use=num_running,
            num_preemptions=0,
            prefix_cache_requests=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_tokens,
        )

    def num_computed_tokens(self, sequence_id: str) -> int:
        """Return 0: nothing is computed."""
        del sequence_id
        return 0

    def align(self, clip: Clip, prompt_ids: list[int], token_ids: list[int]) -> Alignment:
        """Raise VLLMValidationError: there is no model."""
        del clip, prompt_ids, token_ids
        raise VLLMValidationError("there is no model to align transcripts.", parameter="clip")

    def reset_encoder_cache(self) -> bool:
        """Return what a core without encoders returns."""
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:  # noqa: ARG002
        """Return what a core with an empty cache returns."""
        return reset_running_requests or not self._streams

    def sleep(self, level: int) -> None:
        """Refuse requests until `wake_up`: there are no weights and no caches to free."""
        del level
        self._asleep = set(SLEEPING_PARTS)

    def wake_up(self, tags: list[str]) -> None:
        """Take requests again once all parts are awake."""
        self._asleep -= set(tags)

    def set_paused(self, is_paused: bool) -> None:
        """Let requests stay as they are from now on, or go on."""
        self.is_paused = is_paused

    def start_weight_update(self, of_draft: bool = False) -> None:
        """Raise VLLMValidationError: there are no weights."""
        del of_draft
        raise VLLMValidationError("there are no weights to update.", parameter="weights")

    def update_weights(self, weights: Any) -> None:
        """Raise VLLMValidationError: there are no weights."""
        del weights
        self.start_weight_update()

    def finish_weight_update(self, version: str | int | None = None) -> None:
        """Raise VLLMValidationError: there are no weights."""
        del version
        self.start_weight_update()

    def is_updating_weights(self) -> bool:
        """Return False: no update can have begun."""
        return False

    def drop_weight_update(self) -> None:
        """Do nothing: no update can have begun."""

    def get_weights(self) -> Any:
        """Raise VLLMValidationError: there are no weights."""
        self.start_weight_update()

    def set_weight_version(self, version: str | int) -> None:
        """Set the version that `get_weight_version` returns."""
        self.weight_version = version

    def get_weight_version(self) -> str | int:
        """Return the version of weights that are not there."""
        return self.weight_version

    def warm_up(self) -> None:
        """Do nothing: there is nothing to compile."""

    def start_profile(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Raise VLLMValidationError: there is no device to profile."""
        del prefix, delay_iterations, max_iterations
        raise VLLMValidationError("a mock core has no device to profile.", parameter="start_profile")

    def stop_profile(self) -> None:
        """Raise VLLMValidationError: no profile has been started."""
        raise VLLMValidationError("a mock core has no device to profile.", parameter="stop_profile")

    def shutdown(self) -> None:
        """Forget all requests."""
        self._streams.clear()

    def drop(self) -> None:
        """Do as `shutdown` does."""
        self.shutdown()

    def _advance(self, stream: _Stream) -> EngineCoreOutput:
        request, num_before = stream.request, stream.num_tokens
        if stream.reply is None:
            token_id = self._tokens[(stream.first_token + num_before) % len(self._tokens)]
        else:
            token_id = stream.reply[num_before]
        stream.num_tokens = num_before + 1
        if num_before == 0:
            stream.scheduled = time.monotonic()
        reason = stop_reason = None
        if token_id in stream.stop_ids:
            reason, stop_reason = "stop", token_id
        elif stream.reply is not None and stream.num_tokens == len(stream.reply):
            reason = "stop"
        elif stream.num_tokens == request.max_tokens:
            reason = "length"
        if reason is not None:
            del self._streams[request.request_id]
        num_logprobs, asked = request.sampling_params.num_logprobs, request.sampling_params.logprob_token_ids
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token_id],
            new_logprobs=None if num_logprobs is None else [self._logprobs(token_id, num_logprobs, asked)],
            finish_reason=reason,
            stop_reason=stop_reason,
            queued_ts=stream.entered,
            scheduled_ts=stream.scheduled,
        )

    def _logprobs(self, token_id: int, num: int, asked_ids: list[int] | None) -> TokenLogprobs:
        """Make the token the most likely, and the text's tokens the next most likely; ids that are asked for have
        values between -1 and -7.
        """
        if asked_ids:
            return TokenLogprobs([token_id, *asked_ids], [-0.5, *(-1.0 - each % 7 for each in asked_ids)], 1)
        others = [each for each in self._distinct if each != token_id]
        top = [token_id, *others] if num < 0 else [token_id, *others][:num]
        return TokenLogprobs([token_id, *top], [-0.5, *(-0.5 - i for i in range(len(top)))], 1)


def start_mock(
    engine_args: EngineArgs,
    on_tokenizer: Callable[[Tokenizer | None], None] = lambda _: None,
    *,
    usage_context: UsageContext = UsageContext.LLM_CLASS,
    tokens_per_second: float | None = None,
    replies: str | None = None,
    device: DeviceClock | None = None,
) -> tuple[MockCore | EngineCore, EngineReady]:
    """Resolve engine arguments and return a core without weights, with the facts that a front end needs.

    `replies` is the path of a file of answers. With a `device` it is a real core, and they mean nothing.
    """
    from jaxllm.engine.core.engine_tokenizer import load_engine_tokenizer
    from jaxllm.resolve.media_settings import media_settings
    from jaxllm.resolve.resolve_engine import resolve
    from jaxllm.resolve.vllm_config import vllm_config

    config = resolve(engine_args, usage_context=usage_context)
    tokenizer = load_engine_tokenizer(config.args, config.checkpoint, config.cache_dir)
    on_tokenizer(tokenizer)
    vocab_size = config.model_config.vocab_size
    tokens = list(range(vocab_size)) if tokenizer is None else tokenizer.encode([TEXT.read_text(encoding="utf-8")])[0]
    tokens = [each % vocab_size for each in tokens]
    num_blocks = config.num_gpu_blocks_override or 1 + config.max_num_seqs * -(
        -config.max_model_len // config.block_size
    )
    if device is not None:
        core = _real_core(config, num_blocks, device, tokens)
    else:
        core = MockCore(
            tokens,
            max_num_seqs=config.max_num_seqs,
            num_blocks=num_blocks,
            tokens_per_second=tokens_per_second,
            replies=None if replies is None or tokenizer is None else Replies(replies, tokenizer),
        )
    return core, EngineReady(
        vllm_config=vllm_config(config, num_blocks=num_blocks, max_model_len=config.max_model_len),
        stats=core.stats(),
        generation_config={"eos_token_id": config.generation_config.get("eos_token_id")},
        default_sampling_params=dict(config.default_sampling_params),
        max_output_tokens=config.max_output_tokens,
        chat_template=config.chat_template,
        extra_args={},
        has_validators=False,
        has_logits_processors=False,
        has_thinking_tokens=False,
        media=media_settings(config),
        num_weight_bytes=config.checkpoint.num_bytes,
        weight_type=config.checkpoint.weight_type,
    )


def _real_core(config: EngineConfig, num_blocks: int, device: DeviceClock, tokens: list[int]) -> EngineCore:
    """Return an engine's core whose launches go to the mock device; it takes neither grammars nor adapters."""
    from jaxllm.constraints.token_masks import TokenMasks
    from jaxllm.engine.core.engine_core import EngineCore
    from jaxllm.engine.core.startup import Prepared, _scheduler_config
    from jaxllm.execution.model_runner import ModelRunner
    from jaxllm.execution.programs.compiler import StepCompiler
    from jaxllm.resolve.kv_cache_size import step_config
    from jaxllm.resolve.model import checked_model
    from jaxllm.scheduling.scheduler import Scheduler
    from lib.mock_device import MockLauncher

    model, specs = checked_model(config)
    compiler = StepCompiler(step_config(config), model, config.mesh)
    launcher: Any = MockLauncher(compiler, device, tokens)
    prepared = Prepared(config, specs, compiler, launcher.programs, num_blocks, time.monotonic())
    masks = TokenMasks(config.model_config.vocab_size, None, None)
    return EngineCore(Scheduler(_scheduler_config(prepared)), ModelRunner(launcher), masks)


def start_mock_process(
    engine_args: EngineArgs,
    *,
    tokens_per_second: float | None = None,
    replies: str | None = None,
    step_ms: Sequence[float] | None = None,
    asks_core: bool = False,
) -> tuple[RemoteClient, FrontEnd]:
    """Start a mock core in a process of its own and return it with its front end, as `start_in_process` does."""
    command = mock_command(tokens_per_second, replies, step_ms)
    return start_in_process(engine_args, UsageContext.API_SERVER, asks_core=asks_core, command=command)


def mock_command(
    tokens_per_second: float | None = None, replies: str | None = None, step_ms: Sequence[float] | None = None
) -> list[str]:
    """Return the command that runs a mock core for the front end that starts it."""
    rate = [] if tokens_per_second is None else ["--tokens-per-second", str(tokens_per_second)]
    told = [] if replies is None else ["--replies", replies]
    steps = [] if step_ms is None else ["--step-ms", *map(str, step_ms)]
    return [sys.executable, str(Path(__file__).resolve()), *rate, *told, *steps]


def add_step_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--step-ms`."""
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs=4,
        metavar=("PLAIN", "CHUNK", "FULL", "TOKEN"),
        help="a real core on a device that takes so long for a step of decodes, one with a chunk of several tokens, "
        "one with log-probabilities, and for each token besides",
    )


def main() -> int:
    """Run a mock core for the front end that has started this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-second", type=float, help="of each stream (default: as fast as can be)")
    parser.add_argument("--replies", help="JSON file of answers to some prompts")
    add_step_argument(parser)
    args = parser.parse_args()
    device = None
    if args.step_ms is not None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from lib.mock_device import DeviceClock, StepTimes, WallTime

        device = DeviceClock(StepTimes(*args.step_ms), WallTime())
    return serve(
        lambda engine_args, usage_context, on_tokenizer: start_mock(
            engine_args,
            on_tokenizer,
            usage_context=usage_context,
            tokens_per_second=args.tokens_per_second,
            replies=args.replies,
            device=device,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
