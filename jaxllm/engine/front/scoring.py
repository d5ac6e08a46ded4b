"""Score pairs of texts: the prompts to run, and the scores from their outputs, for `LLM.score` and servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.front.text_forms import as_form, counted
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from jaxllm.params.checks import check_int, shown

if TYPE_CHECKING:
    from jaxllm.engine.front.front_end import FrontEnd
    from jaxllm.resolve.pooling_settings import TextForm
    from jaxllm.text.tokenizer import Tokenizer

_TASKS: Mapping[str, str] = {"cross-encoder": "classify", "bi-encoder": "embed", "late-interaction": "token_embed"}
"""The task that is run for each way to score."""
_TINY = 1e-12
"""The length that a shorter vector is divided by, as in sentence-transformers."""

type Score = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class ScorePlan:
    """The prompts to run for some pairs, and which of their outputs make each pair's score."""

    task: str
    prompts: list[Any]
    sources: list[str]
    """For each prompt the name of the argument that has its text, or the second of its two."""
    pairs: list[tuple[int, ...]]
    """For each score the indices of its prompts: one prompt with both texts, or one for each text."""
    compare: Score
    pad_token_id: int | None
    forms: tuple[TextForm | None, TextForm | None] = (None, None)
    """The forms of queries and of documents."""

    def scores(self, outputs: Sequence[PoolingRequestOutput[Any]]) -> list[ScoringRequestOutput]:
        """Return a score for each pair, given the outputs for all prompts in their order."""
        return [self._score([outputs[place] for place in places]) for places in self.pairs]

    def _score(self, outputs: Sequence[PoolingRequestOutput[Any]]) -> ScoringRequestOutput:
        pairs = zip(outputs, self.forms, strict=False)
        vectors = [np.asarray(counted(output, form).outputs.data) for output, form in pairs]
        padding = [] if self.pad_token_id is None else [self.pad_token_id]
        token_ids = list(outputs[0].prompt_token_ids)
        for output in outputs[1:]:
            token_ids += padding + list(output.prompt_token_ids)
        return ScoringRequestOutput(
            request_id="_".join(output.request_id for output in outputs),
            outputs=ScoringOutput(float(vectors[0][0]) if len(vectors) == 1 else self.compare(*vectors)),
            prompt_token_ids=token_ids,
            num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
            finished=True,
        )


class Scorer:
    """Scores pairs of texts in the way that a model does."""

    def __init__(self, front: FrontEnd) -> None:
        """Score as an engine's model does. Raises VLLMValidationError, in vLLM's words, if it scores no pairs."""
        settings = front.ready.pooling
        if settings is None:
            message = "LLM.score() is only supported for pooling models. Try passing `--runner pooling` to use the "
            raise VLLMValidationError(message + "model as a pooling model.", parameter="runner", value="generate")
        if settings.score_type is None:
            if "classify" in settings.tasks:
                raise VLLMValidationError("Scoring API is only enabled for num_labels == 1.")
            raise VLLMValidationError("This model does not support the Scoring API.")
        self._front = front
        self.is_cross_encoder = settings.score_type == "cross-encoder"
        """Whether both texts of a pair make one prompt."""
        self.task = _TASKS[settings.score_type]
        self._forms = settings.query_form, settings.document_form
        self._compare = SIMILARITIES[settings.similarity] if settings.score_type == "bi-encoder" else max_sim
        if settings.similarity == "meanmaxsim":
            self._compare = mean_max_sim
        self.tokenizes = None not in self._forms
        """Whether plans have token ids instead of texts."""
        # As in vLLM, a decoder that was trained as a reranker reads on from one text to the other.
        self._has_separator = settings.runs_whole

    def plan(
        self,
        data_1: Any,
        data_2: Any,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens_per_query: int = 0,
        max_tokens_per_doc: int = 0,
        names: tuple[str, str] = ("data_1", "data_2"),
    ) -> ScorePlan:
        """Plan the scores of pairs: one text with one or many, or as many with as many.

        `chat_template` makes a cross-encoder's prompt of a message of role "query" and one of role "document". A text
        of more tokens than its maximum, where that is not 0, is cut. Raises VLLMValidationError, whose parameter is
        one of `names`.
        """
        queries, documents = _texts(data_1, names[0]), _texts(data_2, names[1])
        _check_lengths(queries, documents, names)
        self._check_template(chat_template, chat_template_kwargs)
        queries = self._cut(queries, "max_tokens_per_query", max_tokens_per_query)
        documents = self._cut(documents, "max_tokens_per_doc", max_tokens_per_doc)
        if len(queries) == 1:
            queries *= len(documents)
        pairs = list(zip(queries, documents, strict=True))
        if self.is_cross_encoder:
            prompts = [self._prompt(*pair, chat_template, chat_template_kwargs) for pair in pairs]
            return self._plan(prompts, [names[1]] * len(pairs), [(place,) for place in range(len(pairs))])
        query_form, document_form = self._forms
        # Each distinct text is run once, or twice if queries have a form of their own.
        sources = {(text, document_form): names[1] for text in documents}
        sources |= {(text, query_form): names[0] for text in queries}
        places = {each: place for place, each in enumerate(sources)}
        prompts = [
            {"prompt": text} if form is None else as_form(self._front, form, {"prompt": text}) for text, form in sources
        ]
        of_pairs = [(places[one, query_form], places[two, document_form]) for one, two in pairs]
        return self._plan(prompts, [*sources.values()], of_pairs)

    def _plan(self, prompts: list[Any], sources: list[str], pairs: list[tuple[int, ...]]) -> ScorePlan:
        tokenizer = self._front.require_tokenizer()
        pad = tokenizer.parts.special_tokens.get("pad_token")
        pad_token_id = None if pad is None else tokenizer.backend.token_to_id(pad)
        return ScorePlan(self.task, prompts, sources, pairs, self._compare, pad_token_id, self._forms)

    def _prompt(self, query: str, document: str, template: str | None, variables: Mapping[str, Any] | None) -> Any:
        """Return the prompt of a pair for a cross-encoder."""
        if template is None:
            if self._has_separator:
                return {"prompt": query, "text_pair": document}
            return {"prompt": query + document}
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        rendered = self._front.chat_renderer.render(
            messages,
            "messages",
            chat_template=template,
            add_generation_prompt=False,
            chat_template_kwargs=variables,
        )
        return dataclasses.replace(rendered, is_templated=False)  # as in vLLM, it gets special tokens too

    def _check_template(self, template: str | None, variables: Mapping[str, Any] | None) -> None:
        if template is not None and not self.is_cross_encoder:
            message = "chat_template has no effect here: each text is run by itself. Leave it out."
            raise VLLMValidationError(message, parameter="chat_template")
        if variables and template is None:
            message = "chat_template_kwargs needs a template of a query and a document: give chat_template."
            raise VLLMValidationError(message, parameter="chat_template_kwargs")

    def _cut(self, texts: list[str], name: str, most: int) -> list[str]:
        """Cut texts to a number of tokens; 0 cuts none."""
        if check_int(name, most, 0, self._front.ready.max_model_len - 1) == 0:
            return texts
        tokenizer = self._front.require_tokenizer()
        return [cut_text(tokenizer, text, most) for text in texts]


def cut_text(tokenizer: Tokenizer, text: str, most: int) -> str:
    """Return the beginning of a text that has `most` tokens at most; 1 or more."""
    text = tokenizer.reach(text, most, "right")
    while True:
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= most:
            return text
        end = min(encoding.offsets[most - 1][1], encoding.offsets[most][0])
        text = text[: min(end, len(text) - 1)]  # the cut text alone may have more tokens


def _texts(texts: Any, name: str) -> list[str]:
    """Return one text or several as a list; a text may be an object with the key "text"."""
    return [_text(each, name) for each in (texts if isinstance(texts, list) else [texts])]


def _text(value: Any, name: str) -> str:
    if isinstance(value, Mapping) and "content" in value:
        message = f"{name}: MultiModalParam is not supported for this model: it reads texts alone."
        raise VLLMValidationError(message, parameter=name, value=value)
    text = value.get("text") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        message = f"{name} must be a text or a list of texts, got {shown(value)}."
        raise VLLMValidationError(message, parameter=name, value=value)
    return text


def _check_lengths(queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]) -> None:
    """Refuse numbers of texts that make no pairs, in vLLM's words."""
    if len(queries) > 1 and len(queries) != len(documents):
        raise VLLMValidationError("Input lengths must be either 1:1, 1:N or N:N", parameter=names[0])
    if not queries:
        raise VLLMValidationError("At least one text element must be given", parameter=names[0])
    if not documents:
        raise VLLMValidationError("At least one text_pair element must be given", parameter=names[1])


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Return the sum, over the query's tokens, of their largest dot products with one of the document's.

    Each is [tokens, dimensions].
    """
    return float((query @ document.T).max(axis=1).sum())


def mean_max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Return `max_sim` divided by the number of the query's tokens."""
    return max_sim(query, document) / max(len(query), 1)


def _cosine(one: np.ndarray, two: np.ndarray) -> float:
    lengths = [max(float(np.linalg.norm(each)), _TINY) for each in (one, two)]
    return float(one @ two) / lengths[0] / lengths[1]


def _exactly(score: Score) -> Score:
    """Return a score that is computed in float64."""
    return lambda one, two: float(score(one.astype(np.float64), two.astype(np.float64)))


SIMILARITIES: Mapping[str, Score] = {
    "cosine": _exactly(_cosine),
    "dot": _exactly(lambda one, two: float(one @ two)),
    "euclidean": _exactly(lambda one, two: -float(np.linalg.norm(one - two))),
    "manhattan": _exactly(lambda one, two: -float(np.abs(one - two).sum())),
}
"""How two embeddings are compared, as sentence-transformers defines it: what is alike has the higher score."""
