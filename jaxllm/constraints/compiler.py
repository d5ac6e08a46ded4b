"""Compile grammars off the engine's thread, within a deadline, each once, and cache the latest ones."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jaxllm.constraints.grammar import grammar_key, grammar_text
from jaxllm.constraints.matcher import Grammar, Vocabulary, brief_error
from jaxllm.constraints.schemas.rewrites import OneOf
from jaxllm.constraints.workers import BigStackThread, DeadlineThread
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.grammar_checks import refuse
from jaxllm.params.limits import MAX_FORCED_BYTES, MAX_PROPERTIES
from jaxllm.params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

_DEADLINE_SECONDS = 5.0
_CACHE_BYTES = 128 << 20
_TOKENIZER_SECONDS = 120.0
_NESTING_ERROR = "recursion limit exceeded"
_ONE_OF_ERROR = "oneOf constraints are not supported"
_NOTHING_ERROR = "schema is false"
_SHOWN_GRAMMAR = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?| 1 \| start: .*", re.DOTALL)
"""Two parts of llguidance's errors: the position in a grammar's text, and that text."""


class GrammarCompiler:
    """Compiles params into grammars. `vocab_size` is the logits' width; `eos_token_ids` may end a complete output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        cache_bytes: int = _CACHE_BYTES,
        deadline_seconds: float = _DEADLINE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self._deadline_seconds = deadline_seconds
        self._cache = _Cache(cache_bytes)
        self._lock = threading.Lock()
        self._in_flight: dict[bytes, Future[Grammar]] = {}
        self._vocabulary: Future[Vocabulary] | None = None
        self._special_tokens: dict[str, int] = {}
        self._compile_thread: DeadlineThread | None = None
        self._match_thread: BigStackThread | None = None

    def check(self, params: StructuredOutputsParams, seconds: float | None = None) -> None:
        """Compile, and raise VLLMValidationError, naming the keyword or limit, if that fails or takes too long.

        With `seconds`, return after that time without an error, though compiling may still fail later.
        """
        with suppress(TimeoutError):
            self.start(params).result(seconds)

    def start(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Start compiling, unless it is running or done. The future fails with a VLLMValidationError."""
        key = grammar_key(params)
        with self._lock:
            grammar = self._cache.get(key)
            if grammar is not None:
                done: Future[Grammar] = Future()
                done.set_result(grammar)
                return done
            if key in self._in_flight:
                return self._in_flight[key]
            future: Future[Grammar] = Future()
            future.set_running_or_notify_cancel()  # shared: no caller may cancel it
            try:
                inner = self._submit(params)
            except RuntimeError as error:  # no thread can be started
                future.set_exception(refuse(params.kind, f"{error}."))
                return future
            self._in_flight[key] = future
        inner.add_done_callback(lambda inner: self._finish(key, params.kind, inner, future))
        return future

    def submit[T](self, run: Callable[[], T]) -> Future[T]:
        """Run a function that uses matchers on their thread, after earlier calls."""
        with self._lock:
            if self._match_thread is None:
                self._match_thread = BigStackThread("jaxllm-matchers")
            return self._match_thread.submit(run)

    def _submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        if self._compile_thread is None:
            self._compile_thread = DeadlineThread("jaxllm-grammars")
        vocabulary = self._vocabulary
        if vocabulary is None or (vocabulary.done() and isinstance(vocabulary.exception(), RuntimeError)):
            # If no thread could be started to load it, one may start now.
            late = f"the tokenizer could not be prepared in {_TOKENIZER_SECONDS:.0f} s"
            vocabulary = self._vocabulary = self._compile_thread.submit(self._load_vocabulary, _TOKENIZER_SECONDS, late)
        late = f"it did not compile in {self._deadline_seconds:g} s; make it smaller or simpler"
        return self._compile_thread.submit(
            lambda: self._compile(vocabulary.result(), params), self._deadline_seconds, late
        )

    def _finish(self, key: bytes, kind: str, inner: Future[Grammar], future: Future[Grammar]) -> None:
        error = inner.exception()
        with self._lock:
            del self._in_flight[key]
            if error is None:
                self._cache.put(key, inner.result())
        if error is None:
            future.set_result(inner.result())
        elif isinstance(error, VLLMValidationError):
            future.set_exception(error)
        else:
            is_plain = isinstance(error, (TimeoutError, RuntimeError))
            reason = str(error) if is_plain else f"{type(error).__name__}: {error}"
            future.set_exception(refuse(kind, f"{brief_error(reason)}."))

    def _load_vocabulary(self) -> Vocabulary:
        from llguidance import LLTokenizer

        backend = self._tokenizer.backend
        num_tokens = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        try:
            num_ids = max(self._vocab_size, num_tokens, 1 + max(added, default=0))
            tokenizer = LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=self.eos_token_ids or None)
        except Exception as error:
            message = f"structured_outputs cannot be used with this model's tokenizer: {brief_error(str(error))}"
            raise VLLMValidationError(message, parameter="structured_outputs") from error
        return Vocabulary(tokenizer, max(num_tokens, 1 + max(added, default=0)), self._vocab_size)

    def _compile(self, vocabulary: Vocabulary, params: StructuredOutputsParams) -> Grammar:
        try:
            return self._compile_with(vocabulary, params, OneOf.KEPT)
        except VLLMValidationError as error:
            if _ONE_OF_ERROR not in str(error):
                raise
        try:
            return self._compile_with(vocabulary, params, OneOf.EXPANDED)
        except VLLMValidationError as error:
            if _NOTHING_ERROR in str(error):
                raise
            # A branch, or a part of one, has no known opposite schema: branches cannot be kept apart.
            return self._compile_with(vocabulary, params, OneOf.ANY)

    def _compile_with(self, vocabulary: Vocabulary, params: StructuredOutputsParams, one_of: OneOf) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_lexer_states=50_000,  # each takes 1 to 2 KB
            max_items_in_row=20 * MAX_PROPERTIES,  # if all are optional, each takes 16
            step_max_items=500 * MAX_PROPERTIES,  # about 20,000 take a millisecond
            verbose_errors=False,
        )
        text = grammar_text(params, self._special_tokens, one_of=one_of)
        start = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if start.is_error():
            nested = "nested too deep; not, if, oneOf and contains count more than once: "
            error = brief_error(start.get_error())
            if params.kind == "structural_tag":  # the error quotes a grammar that the user did not write
                error = _SHOWN_GRAMMAR.sub("", error)
            raise refuse(params.kind, nested + error if _NESTING_ERROR in error else error)
        grammar = Grammar(vocabulary, start, _num_text_bytes(params.kind, text))
        if grammar.forces_too_much:
            message = f"all outputs begin with the same text of more than {MAX_FORCED_BYTES} bytes; make it shorter."
            raise refuse(params.kind, message)
        error = grammar.first_error()
        if error is not None:
            raise refuse(params.kind, f"no output matches it: {error}")
        return grammar


def make_grammar_compiler(
    tokenizer: Tokenizer, vocab_size: int, generation_config: Mapping[str, Any]
) -> GrammarCompiler:
    """Make the compiler for a model. An output may end with the tokenizer's EOS or those of the generation config."""
    more = generation_config.get("eos_token_id")
    ids = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    eos_token_ids = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return GrammarCompiler(tokenizer, vocab_size, eos_token_ids)


def _num_text_bytes(kind: str, text: str) -> int:
    """Return an upper estimate of a grammar's memory from its text; the factors are measured worst cases."""
    if kind in ("json", "json_object"):
        return 32 * len(text) + 8_000 * text.count("{")
    return {"choice": 32, "regex": 96}.get(kind, 256) * len(text)


class _Cache:
    """The most recently used grammars, up to a total number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Grammar | None:
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
        return grammar

    def put(self, key: bytes, grammar: Grammar) -> None:
        """Store a grammar. The latest one stays even if it is too large, or each of its requests would compile it
        again.
        """
        self._grammars[key] = grammar
        self.num_bytes += grammar.num_bytes + len(key)
        while self.num_bytes > self._max_bytes and len(self._grammars) > 1:
            key, grammar = self._grammars.popitem(last=False)
            self.num_bytes -= grammar.num_bytes + len(key)
