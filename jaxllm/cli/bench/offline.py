"""`jaxllm bench throughput` and `jaxllm bench latency` measure an engine in this process, without a server."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxllm.cli.bench.datasets import add_dataset_flags, make_samples
from jaxllm.cli.bench.figures import percentile
from jaxllm.cli.flags.engine_flags import add_engine_flags, read_engine_args
from jaxllm.cli.flags.numbers import natural, positive
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import SamplingParams
from jaxllm.utils.streams import show, writing

if TYPE_CHECKING:
    from jaxllm.inputs import TokensPrompt

_PERCENTILES = (10, 25, 50, 75, 90, 99)


class Model(Protocol):
    """The part of an LLM that the benchmark calls."""

    @property
    def llm_engine(self) -> Any: ...

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]: ...

    def shutdown(self) -> None: ...


type _MakeModel = Callable[[EngineArgs], Model]


def add_throughput_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `throughput`."""
    parser = commands.add_parser(
        "throughput",
        help="measure an engine's throughput with many prompts at once",
        description="Run all prompts on one engine in this process and report requests and tokens per second.",
        epilog="Exit status: 0 measured, 2 misuse, 4 results could not be written.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--backend", choices=("vllm",), default="vllm", help="the only choice: this program's engine")
    add_dataset_flags(parser)
    _add_common_flags(parser)
    parser.set_defaults(run=run_throughput, disable_log_stats=True)
    return parser


def add_latency_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `latency`."""
    parser = commands.add_parser(
        "latency",
        help="measure an engine's latency for one batch",
        description="Run one batch of prompts of random tokens repeatedly on one engine in this process, and "
        "report how long it takes. Prefixes are not cached unless --enable-prefix-caching is given.",
        epilog="Exit status: 0 measured, 2 misuse, 4 results could not be written.",
        allow_abbrev=False,
        add_help=False,
    )
    group = parser.add_argument_group("batch")
    for flag, default, help_text in (
        ("--input-len", 32, "tokens of a prompt"),
        ("--output-len", 128, "tokens of an output"),
        ("--batch-size", 8, "prompts of the batch"),
        ("--num-iters", 30, "runs that count"),
    ):
        group.add_argument(flag, type=positive, default=default, metavar="N", help=f"{help_text}; default: %(default)s")
    group.add_argument(
        "--num-iters-warmup", type=natural, default=10, metavar="N", help="runs before; default: %(default)s"
    )
    _add_common_flags(parser)
    parser.set_defaults(run=run_latency, disable_log_stats=True, enable_prefix_caching=False)
    return parser


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=positive, default=1, metavar="N", help="outputs per prompt")
    parser.add_argument("--disable-detokenize", action="store_true", help="do not detokenize outputs")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures there too")
    add_engine_flags(parser)


def run_throughput(
    args: argparse.Namespace, make: _MakeModel | None = None, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Measure one run of all prompts and return the exit status."""
    llm = (make or _load)(_engine_args(args))
    try:
        samples = make_samples(args, llm.llm_engine.front.require_tokenizer())
        params = [_params(args, each.output_len) for each in samples]
        start = clock()
        outputs = llm.generate([each.prompt for each in samples], params, use_tqdm=True)
        seconds = max(clock() - start, 1e-9)
    finally:
        llm.shutdown()
    num_input = sum(len(each.prompt_token_ids or ()) for each in outputs)
    num_output = _num_output_tokens(outputs)
    total = num_input + num_output
    show(
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{num_output / seconds:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {num_input}\nTotal num output tokens:  {num_output}"
    )
    figures = {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": total / seconds,
    }
    _save(args, figures)
    return 0


def run_latency(
    args: argparse.Namespace, make: _MakeModel | None = None, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Measure the runs of one batch and return the exit status."""
    llm = (make or _load)(_engine_args(args))
    try:
        prompts = _random_prompts(args, llm.llm_engine.model_config.get_vocab_size())
        params = _params(args, args.output_len)
        for _ in range(args.num_iters_warmup):
            llm.generate(prompts, params, use_tqdm=False)
        latencies: list[float] = []
        for _ in range(args.num_iters):
            start = clock()
            llm.generate(prompts, params, use_tqdm=False)
            latencies.append(clock() - start)
    finally:
        llm.shutdown()
    ordered = sorted(latencies)
    mean = sum(ordered) / len(ordered)
    percentiles = {percent: percentile(ordered, percent) for percent in _PERCENTILES}
    lines = [f"{percent}% percentile latency: {value:.6f} seconds" for percent, value in percentiles.items()]
    show("\n".join([f"Avg latency: {mean:.6f} seconds", *lines]))
    _save(args, {"avg_latency": mean, "latencies": latencies, "percentiles": percentiles})
    return 0


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    """Return the engine's arguments. Raises VLLMValidationError, also if the results could not be written."""
    if args.output_json is not None and not Path(args.output_json).expanduser().parent.is_dir():
        message = f"--output-json {args.output_json}: there is no such folder."
        raise VLLMValidationError(message, parameter="output_json", value=args.output_json)
    return read_engine_args(args)


def _load(engine_args: EngineArgs) -> Model:
    from jaxllm.llm import LLM

    return LLM.from_engine_args(engine_args)


def _params(args: argparse.Namespace, output_len: int) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=not args.disable_detokenize,
    )


def _random_prompts(args: argparse.Namespace, vocab_size: int) -> list[TokensPrompt]:
    random = Random(args.seed)
    return [{"prompt_token_ids": random.choices(range(vocab_size), k=args.input_len)} for _ in range(args.batch_size)]


def _num_output_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(each.token_ids) for output in outputs for each in output.outputs)


def _save(args: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """Write the JSON file, if one was requested. Raises OutputError."""
    if args.output_json is not None:
        path = Path(args.output_json).expanduser()
        with writing(path):
            path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
