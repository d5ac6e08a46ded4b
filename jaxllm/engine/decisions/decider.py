"""Plan decisions as requests of an engine, and read the answers from their outputs.

Each prompt is one request for the log-probabilities of the tokens that begin its options, and options of several tokens
are forks of it, one per row. All prompts about a state fork the first one: the engine computes what they share once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxllm.decisions import (
    MAX_ORDERS,
    MAX_ROWS,
    MAX_TEXT_LENGTH,
    Answer,
    DecisionOutput,
    Question,
    read_questions,
    text_of,
)
from jaxllm.engine.decisions.prompts import NULL_STATE, Template, ask, orders
from jaxllm.engine.decisions.token_rows import OptionTokens, Row, Tokens, logsumexp, option_tokens
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.engine.front.prompt_encoder import too_long
from jaxllm.exceptions import EngineGenerateError, VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.outputs import RequestOutput
from jaxllm.params.checks import check_bool, check_int, shown
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.scheduling.cache.kv_cache_manager import common_length
from jaxllm.text.prompts import ParsedPrompt

_PARAMS = SamplingParams(
    temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


@dataclass(frozen=True, slots=True)
class DecisionOptions:
    """How questions are asked."""

    template: Template = field(default_factory=Template)
    instructions: str | None = None
    """Context that comes after the state, before each question."""
    calibrate: bool = False
    """Divide each option's probability by the one that it has after a state that says nothing."""
    num_orders: int = 1
    """The orders in which a question lists its options; the probabilities are averaged over them."""

    def __post_init__(self) -> None:
        check_bool("calibrate", self.calibrate)
        check_int("num_orders", self.num_orders, 1, MAX_ORDERS)


@dataclass(slots=True)
class _Reading:
    """One prompt: a question in one order of its options, about the state or about none."""

    question_id: str
    is_null: bool
    prompt: ParsedPrompt
    tokens: OptionTokens
    rows: list[Row]
    table: dict[Tokens, dict[int, float]] = field(default_factory=dict)
    """The log-probabilities read so far, by the path of the row."""
    argmax: int | None = None
    """The most likely first token."""
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0

    def take(self, row: Row, output: RequestOutput) -> None:
        """Take in the output of a row. Raises EngineGenerateError if it has ended without log-probabilities."""
        completion = output.outputs[0]
        if not completion.logprobs:
            reason = f"{completion.finish_reason!r}: {completion.stop_reason}"
            raise EngineGenerateError(f"questions[{shown(self.question_id)}] ended without an answer, by {reason}")
        values = completion.logprobs[0]
        if not row.path and self.argmax is None:
            self.argmax = completion.token_ids[0]
            self.num_cached_tokens = output.num_cached_tokens or 0
            self.num_cache_creation_tokens = output.num_cache_creation_tokens or 0
        self.table.setdefault(row.path, {}).update((each, values[each].logprob) for each in row.next_ids)


class Decision:
    """The questions about one state, from their prompts to their answers.

    After `take` had the output of each of its `requests`, `answer` has the result.
    """

    def __init__(self, front: FrontEnd, state: Any, questions: Any, options: DecisionOptions) -> None:
        """Render all prompts. Raises VLLMValidationError for what cannot be asked, or takes more than MAX_ROWS rows."""
        check_logprobs_mode(front)
        self._front, self._options = front, options
        self._questions = read_questions(questions)
        self._owners: dict[str, tuple[_Reading, Row]] = {}
        self._readings = self._read(text_of(state, "state"))
        self.num_new_tokens = 0
        """The number of tokens of the prompts, once there are requests; what a prompt shares is counted once."""

    def requests(
        self,
        new_id: Callable[[], str],
        priority: int = 0,
        adapter: LoRARequest | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> list[ProcessedRequest]:
        """Tokenize all prompts and return the requests of all rows; `new_id` names them for the engine.

        Raises VLLMValidationError if a prompt with the longest option does not fit the context.
        """
        count = len(self._readings)
        roots = self._front.inputs.process_batch(
            [""] * count,
            [reading.prompt for reading in self._readings],
            [_PARAMS] * count,
            priorities=[priority] * count,
            lora_requests=[adapter] * count,
            label="questions",
        )
        requests: list[ProcessedRequest] = []
        donors: dict[bool, ProcessedRequest] = {}
        for reading, root in zip(self._readings, roots, strict=True):
            donor, length = donors.setdefault(reading.is_null, root), len(root.prompt_token_ids)
            self._check_length(reading, length)
            shared = 0 if donor is root else common_length(donor.prompt_token_ids, root.prompt_token_ids, length)
            self.num_new_tokens += length - shared
            reading.num_input_tokens = length
            for i, row in enumerate(reading.rows):
                forked = root if i else donor
                fork_of = None if i == 0 and donor is root else forked.core.request_id
                request = _row_request(root, row, i, fork_of, new_id(), None if i else trace)
                self._owners[request.request_id] = reading, row
                requests.append(request)
        return requests

    def take(self, output: RequestOutput) -> None:
        """Take in the final output of one of the requests. Raises EngineGenerateError if it has ended without a row."""
        reading, row = self._owners.pop(output.request_id)
        reading.take(row, output)

    def answer(self) -> DecisionOutput:
        """Return the answers, after `take` had the outputs of all requests."""
        return DecisionOutput(
            {name: self._answer(name, question) for name, question in self._questions.items()},
            sum(reading.num_input_tokens for reading in self._readings),
            sum(reading.num_cached_tokens for reading in self._readings),
            sum(reading.num_cache_creation_tokens for reading in self._readings),
            sum(len(reading.rows) for reading in self._readings),
        )

    def _check_length(self, reading: _Reading, length: int) -> None:
        limit, longest = self._front.ready.max_model_len, length + reading.tokens.longest
        if longest > limit:
            raise too_long(limit, f"questions[{shown(reading.question_id)}]", longest, f"{longest} tokens")

    def _read(self, state: str) -> list[_Reading]:
        options, front = self._options, self._front
        instructions = options.instructions
        if instructions is not None:
            instructions = text_of(instructions, "instructions", MAX_TEXT_LENGTH)
        end_id = options.template.end_id(front)
        tokens = {name: _tokens(front, name, question, end_id) for name, question in self._questions.items()}
        rows = {name: tokens[name].rows() for name in tokens}
        asked = {name: orders(question, options.num_orders) for name, question in self._questions.items()}
        num_rows = sum(len(rows[name]) * len(asked[name]) for name in rows) * (2 if options.calibrate else 1)
        if num_rows > MAX_ROWS:
            message = (
                f"the questions take {num_rows} rows of log-probabilities, more than {MAX_ROWS}; ask fewer at once."
            )
            raise VLLMValidationError(message, parameter="questions", value=num_rows)
        readings: list[_Reading] = []
        for is_null in (False, True) if options.calibrate else (False,):
            template = dataclasses.replace(options.template, images=()) if is_null else options.template
            for name, question in self._questions.items():
                for order in asked[name]:
                    text = ask(NULL_STATE if is_null else state, instructions, question, order)
                    prompt = template.render(front, text)
                    readings.append(_Reading(name, is_null, prompt, tokens[name], rows[name]))
        return readings

    def _answer(self, name: str, question: Question) -> Answer:
        about_state = [each for each in self._readings if each.question_id == name and not each.is_null]
        about_null = [each for each in self._readings if each.question_id == name and each.is_null]
        logprobs = _averaged(about_state)
        weights = logprobs
        if about_null:
            weights = [_calibrated(*pair) for pair in zip(logprobs, _averaged(about_null), strict=True)]
        total = logsumexp(weights)
        names = [option.name for option in question.options]
        legend = {each.name: each.description or each.name for each in question.options}
        return Answer(
            question.type,
            {each: _share(weight, total, len(names)) for each, weight in zip(names, weights, strict=True)},
            dict(zip(names, logprobs, strict=True)),
            min(1.0, math.fsum(map(math.exp, logprobs))),
            all(each.argmax in each.tokens.first_ids for each in about_state),
            legend if question.type == "score" else None,
        )


def check_logprobs_mode(front: FrontEnd) -> None:
    """Refuse engines that do not generate, and those that return logits."""
    if "generate" not in front.supported_tasks:
        raise VLLMValidationError("decisions need a model that generates text.", parameter="runner")
    mode = front.ready.vllm_config.model_config.logprobs_mode
    if mode.endswith("logits"):
        message = f"decisions need log-probabilities, which this engine, started with logprobs_mode={mode!r}, lacks."
        raise VLLMValidationError(message, parameter="logprobs_mode", value=mode)


def _row_request(
    root: ProcessedRequest,
    row: Row,
    index: int,
    fork_of: str | None,
    request_id: str,
    trace: Mapping[str, str] | None,
) -> ProcessedRequest:
    params = copy.copy(root.core.sampling_params)
    params.logprob_token_ids = row.next_ids
    core = msgspec.structs.replace(
        root.core,
        request_id=root.core.request_id + (f".{index}.decision" if index else ""),
        prompt_token_ids=[*root.core.prompt_token_ids, *row.path],
        sampling_params=params,
        fork_of=fork_of,
    )
    return ProcessedRequest(request_id, None, core, trace)


def _tokens(front: FrontEnd, name: str, question: Question, end_id: int | None) -> OptionTokens:
    """Return the tokens of a question's options, encoded alone: they follow the prompt's tokens."""
    texts = [text for option in question.options for text in option.spellings]
    encoded = iter(front.require_tokenizer().encode(texts, add_special_tokens=False))
    spellings = [[next(encoded) for _ in option.spellings] for option in question.options]
    if max(token_id for option in spellings for each in option for token_id in each or [0]) >= front.ready.vocab_size:
        message = f"questions[{shown(name)}]: an option has tokens that the model lacks."
        raise VLLMValidationError(message, parameter="questions", value=name)
    tokens = option_tokens(spellings, end_id)
    if tokens is None:
        message = f"questions[{shown(name)}]: the model cannot tell its options apart: some have the same tokens."
        raise VLLMValidationError(message, parameter="questions", value=name)
    return tokens


def _averaged(readings: Sequence[_Reading]) -> list[float]:
    """Return the logarithm of each option's mean probability over the orders."""
    values = [each.tokens.logprobs(each.table) for each in readings]
    return [logsumexp(option) - math.log(len(values)) for option in zip(*values, strict=True)]


def _calibrated(logprob: float, null: float) -> float:
    """Return the logarithm of an option's probability over the one that it has without a state, if that is not 0."""
    return logprob if math.isinf(logprob) or math.isinf(null) else logprob - null


def _share(weight: float, total: float, count: int) -> float:
    """Return an option's share; equal shares if no option has any probability."""
    return 1 / count if math.isinf(total) else math.exp(weight - total)
