"""`jaxllm bench serve` sends requests to a server at a chosen rate, and reports throughput and latencies."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from jaxllm.cli.bench.datasets import Sample, add_dataset_flags, make_samples
from jaxllm.cli.bench.drafts import draft_figures, read_drafts
from jaxllm.cli.bench.figures import METRICS, Conditions, Result, count_errors, report, summarize
from jaxllm.cli.bench.load import Target, send_all, wait_ready
from jaxllm.cli.bench.traffic import STRATEGIES, Ramp, send_times
from jaxllm.cli.client.openai_client import OpenAIClient, RequestError
from jaxllm.cli.flags.numbers import above_zero, natural, positive, seconds
from jaxllm.config.environment import default_cache_dir
from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import Tokenizer, load_named_tokenizer
from jaxllm.utils.streams import losing_messages, say, show, writing

_ENDPOINTS = {"vllm": "/v1/completions", "openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""The endpoint of each backend; all three are OpenAI's API."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_MOST_ERRORS = 5
"""The number of different errors shown."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="measure a running server",
        description="Send requests to a server with OpenAI's API and report throughput and latencies: TTFT, TPOT, ITL "
        "and E2EL. Tokens are counted by the server, in its usage.",
        epilog="Exit status: 0 measured, 1 the server was not ready or requests failed, 2 misuse, "
        "4 results could not be written.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="flags and their values; the command line wins")
    _add_server_flags(parser)
    add_dataset_flags(parser)
    _add_traffic_flags(parser)
    _add_request_flags(parser)
    _add_result_flags(parser)
    parser.set_defaults(run=run)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=tuple(_ENDPOINTS), default="openai", help="kind of API; default: openai")
    group.add_argument("--base-url", metavar="URL", help="address of the server, in place of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=positive, default=8000, metavar="N", help="default: %(default)s")
    group.add_argument("--endpoint", metavar="PATH", help="default: that of the backend")
    group.add_argument("--header", nargs="+", default=[], metavar="NAME=VALUE", help="headers of every request")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY")
    group.add_argument("--insecure", action="store_true", help="take any certificate")
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument("--served-model-name", metavar="NAME", help="what requests call the model; default: --model")
    group.add_argument(
        "--tokenizer", metavar="NAME", help="folder, .gguf file or hub id; default: what the server has loaded"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=seconds, default=0, metavar="S", help="wait this long for an answer"
    )


def _add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--request-rate", type=above_zero, default=math.inf, metavar="X", help="per second; default: inf"
    )
    group.add_argument(
        "--burstiness", type=above_zero, default=1.0, metavar="X", help="1: a Poisson process; less: more bursty"
    )
    group.add_argument("--max-concurrency", type=positive, metavar="N", help="requests at a time")
    group.add_argument("--ramp-up-strategy", choices=STRATEGIES, help="let the rate grow over the run")
    group.add_argument("--ramp-up-start-rps", type=seconds, metavar="X", help="requests per second at the start")
    group.add_argument("--ramp-up-end-rps", type=seconds, metavar="X", help="requests per second at the end")
    group.add_argument("--num-warmups", type=natural, default=0, metavar="N", help="uncounted requests before the run")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and traffic; default: 0")


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--ignore-eos", action="store_true", help="do not end outputs at EOS")
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help="default: the server's")
    group.add_argument("--logprobs", type=natural, metavar="N", help="log-probabilities of this many tokens")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of each request"
    )
    group.add_argument(
        "--request-id-prefix", metavar="TEXT", help="send the header X-Request-Id, with this and a number"
    )


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentile-metrics", type=_metrics, default=tuple(METRICS), metavar="LIST", help=f"of {','.join(METRICS)}"
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=(99.0,), metavar="LIST", help="such as 50,90,99; default: 99"
    )
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="count requests within limits on ttft, tpot, e2el"
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with each request's times, text and error")
    group.add_argument("--append-result", action="store_true", help="append a line to an existing file")
    group.add_argument("--result-dir", metavar="DIR", default=".", help="default: the current folder")
    group.add_argument("--result-filename", metavar="FILE", help="default: named for backend, rate, model and time")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="more fields of the JSON")
    group.add_argument("--label", metavar="TEXT", help="name of this run, in place of the backend's")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return the exit status."""
    conditions = _conditions(args)
    _pairs(args.metadata, "metadata")
    ramp = _ramp(args)
    if args.save_result and not Path(args.result_dir).expanduser().is_dir():
        message = f"--result-dir {args.result_dir}: there is no such folder."
        raise VLLMValidationError(message, parameter="result_dir", value=args.result_dir)
    try:
        measured = _runner()(_measure(args, ramp))
    except RequestError as error:
        say(f"jaxllm: error: {error}")
        return 1
    figures = summarize(measured.results, measured.seconds, measured.cpu_seconds, conditions) | measured.drafts
    show("\n".join(report(figures, conditions)))
    errors = count_errors(measured.results)
    for error, num in errors[:_MOST_ERRORS]:
        say(f"{num} failed: {error}")
    if len(errors) > _MOST_ERRORS:
        say(f"and {len(errors) - _MOST_ERRORS} other errors; --save-detailed has them all.")
    if args.save_result or args.append_result:
        _save(args, measured, figures)
    return 1 if errors else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    """The measurements of a run."""

    model: str
    tokenizer: str
    samples: Sequence[Sample]
    results: Sequence[Result]
    seconds: float
    cpu_seconds: float
    """CPU time of this process, the client, during the run."""
    drafts: Mapping[str, Any]
    """The figures of the server's drafts, if it made any."""


def _runner() -> Any:
    if find_spec("uvloop") is None:
        return asyncio.run
    import uvloop

    return uvloop.run


async def _measure(args: argparse.Namespace, ramp: Ramp | None) -> _Measured:
    """Send all requests. Raises RequestError if the server cannot be reached, VLLMValidationError for bad flags."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    client = OpenAIClient(
        args.base_url or f"http://{host}:{args.port}",
        api_key=args.api_key,
        headers=_pairs(args.header, "header"),
        checks_certificates=not args.insecure,
    )
    async with client:
        name, loaded = await _find_model(args, client)
        tokenizer = load_named_tokenizer(loaded, default_cache_dir())
        is_chat = args.backend == "openai-chat"
        target = Target(
            client, args.endpoint or _ENDPOINTS[args.backend], is_chat, args.served_model_name or name, _extra(args)
        )
        samples = make_samples(args, tokenizer, is_chat=is_chat)
        count = partial(_count, tokenizer)
        if args.ready_check_timeout_sec:
            await wait_ready(target, samples[0], count, args.ready_check_timeout_sec)
        for i in range(args.num_warmups):
            await target.ask(samples[i % len(samples)], count)
        times = send_times(len(samples), args.request_rate, args.burstiness, Random(args.seed), ramp)
        drafts_before = await read_drafts(client)
        with _Progress(len(samples), args.disable_tqdm) as progress:
            start, cpu_start = time.perf_counter(), time.process_time()
            results = await send_all(
                target,
                samples,
                times,
                max_concurrency=args.max_concurrency,
                count=count,
                advance=progress.advance,
                id_prefix=args.request_id_prefix,
            )
            taken, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        drafts = draft_figures(drafts_before, await read_drafts(client))
    return _Measured(name, loaded, samples, results, taken, cpu, drafts)


async def _find_model(args: argparse.Namespace, client: OpenAIClient) -> tuple[str, str]:
    """Return the model's name, and the source of its tokenizer."""
    if args.model is not None:
        return args.model, args.tokenizer or args.model
    first = (await client.models())[0]
    return first.id, args.tokenizer or first.root or first.id


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode([text], add_special_tokens=False)[0])


class _Progress:
    """A bar on standard error with the number of finished requests."""

    def __init__(self, total: int, is_disabled: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="req", file=sys.stderr, disable=is_disabled, mininterval=0.2)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        with losing_messages():
            self._bar.close()

    def advance(self) -> None:
        """Count one more."""
        with losing_messages():
            self._bar.update()


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of every request that the flags set."""
    extra = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.ignore_eos:
        extra["ignore_eos"] = True
    if args.logprobs is not None:
        is_chat = args.backend == "openai-chat"
        extra |= {"logprobs": True, "top_logprobs": args.logprobs} if is_chat else {"logprobs": args.logprobs}
    return extra | args.extra_body


def _conditions(args: argparse.Namespace) -> Conditions:
    goodput: dict[str, float] = {}
    for text in args.goodput:
        name, colon, value = text.partition(":")
        try:
            goodput[name] = float(value)
        except ValueError:
            colon = ""
        if not colon or name not in ("ttft", "tpot", "e2el") or not goodput[name] >= 0:
            message = f"--goodput {text!r}: write NAME:MILLISECONDS, with ttft, tpot or e2el, such as ttft:200."
            raise VLLMValidationError(message, parameter="goodput", value=text)
    return Conditions(
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        percentiles=args.metric_percentiles,
        metrics=args.percentile_metrics,
        goodput=goodput,
    )


def _ramp(args: argparse.Namespace) -> Ramp | None:
    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None and ends == (None, None):
        return None
    if args.ramp_up_strategy is None or None in ends:
        message = "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps."
        raise VLLMValidationError(message, parameter="ramp_up_strategy", value=args.ramp_up_strategy)
    if math.isfinite(args.request_rate):
        message = "a ramp says the rate: leave --request-rate out."
        raise VLLMValidationError(message, parameter="request_rate", value=args.request_rate)
    return Ramp(args.ramp_up_strategy, *ends)


def _save(args: argparse.Namespace, measured: _Measured, figures: dict[str, Any]) -> None:
    """Write the JSON file. Raises OutputError."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate = "inf" if math.isinf(args.request_rate) else args.request_rate
    document = {
        "date": now,
        "backend": args.backend,
        "label": args.label,
        "model_id": measured.model,
        "tokenizer_id": measured.tokenizer,
        "num_prompts": len(measured.samples),
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **_pairs(args.metadata, "metadata"),
        **figures,
    }
    if args.save_detailed:
        results = measured.results
        document |= {
            "input_lens": [each.prompt_len for each in results],
            "output_lens": [each.output_len for each in results],
            "start_times": [each.start for each in results],
            "ttfts": [each.ttft for each in results],
            "itls": [each.itl for each in results],
            "generated_texts": [each.text for each in results],
            "errors": [each.error or "" for each in results],
        }
    base = Path(measured.model).name
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    name = args.result_filename or f"{args.label or args.backend}-{rate}qps{limit}-{base}-{now}.json"
    path = Path(args.result_dir).expanduser() / name
    with writing(path), path.open("ab" if args.append_result else "wb") as file:
        file.write(msgspec.json.encode(document) + b"\n")


def _pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    """Parse KEY=VALUE words. Raises VLLMValidationError."""
    for word in words:
        if "=" not in word:
            raise VLLMValidationError(f"--{flag} {word!r}: write KEY=VALUE.", parameter=flag, value=word)
    return dict(word.split("=", 1) for word in words)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"it is no JSON object: {error}") from error


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    values = tuple(float(word) for word in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: percentiles are from 0 to 100")
    return values
