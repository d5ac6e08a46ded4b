"""The types of Ollama's requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.server.openai.logprobs import ChatTokenLogprob
from jaxllm.server.openai.prompt_fields import Messages, Tools


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The sampling options. Other options, mostly about the machine, have no effect."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    num_predict: int | None = None
    """The maximum number of tokens of the answer; unlimited unless it is above 0."""
    stop: str | list[str] | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    """The penalty counts all tokens so far; 0 turns it off."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """The fields that requests for text share."""

    model: str
    stream: bool | None = True
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    options: OllamaOptions | None = None
    think: bool | str | None = None
    """Whether the model reasons; "low", "medium" or "high" for those that take it so."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """The number of most likely tokens to list at each position."""
    keep_alive: float | str | None = None
    """How long the model stays loaded, in seconds or as "5m"; 0 unloads it. A server's only model always stays."""
    truncate: bool | None = None
    shift: bool | None = None
    """These last two have no effect: prompts that are too long are refused, and answers end with the context."""


OLLAMA_REFUSED: Mapping[str, str] = {"_debug_render_only": "prompts are not shown; use /v1/chat/completions"}
"""Fields that are refused: they would change the answer and are not supported."""


class OllamaChatRequest(OllamaFields, kw_only=True):
    """The request of `/api/chat`."""

    messages: Messages | None = None
    """Without it the answer only tells that the model is loaded."""
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """The request of `/api/generate`."""

    prompt: str | None = None
    """Without it the answer only tells that the model is loaded."""
    system: str | None = None
    raw: bool | None = None
    """Use the prompt without the chat template."""
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    """These last four must be empty."""


class OllamaEmbedFields(msgspec.Struct, kw_only=True):
    """The fields that requests for embeddings share."""

    model: str
    options: dict[str, Any] | None = None
    """They have no effect: they concern sampling or the machine."""
    keep_alive: float | str | None = None
    """How long the model stays loaded, in seconds or as "5m"; 0 unloads it. A server's only model always stays."""


class OllamaEmbedRequest(OllamaEmbedFields, kw_only=True):
    """The request of `/api/embed`."""

    input: str | list[str] | None = None
    """Without any the answer has no embeddings."""
    truncate: bool | None = True
    """False refuses texts that are longer than the context; otherwise they are cut."""
    dimensions: int | None = None
    """The size of the embeddings, which are cut and normalized again."""


class OllamaEmbeddingRequest(OllamaEmbedFields, kw_only=True):
    """The request of `/api/embeddings`, the older form."""

    prompt: str | None = None


class OllamaEmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/api/embed`, with times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, frozen=True):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of an answer, or its delta."""

    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a line of one that is streamed; the last line has the counts, and times in nanoseconds."""

    model: str
    created_at: str
    message: OllamaMessage | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    """The log-probabilities of the tokens since the last line."""
    response: str | UnsetType = UNSET
    """The text of `/api/generate`."""
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of model it is."""

    parent_model: str = ""
    format: str = "jax"
    family: str = "jaxllm"
    families: tuple[str, ...] = ("jaxllm",)
    parameter_size: str = ""
    quantization_level: str
    """The type of most weights, by its name in GGUF."""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name of the model. `/api/ps` sets the last three."""

    name: str
    model: str
    modified_at: str
    """The time of the server's start."""
    size: int
    """The size of the weights in bytes, as they are stored."""
    digest: str
    """The digest of the name."""
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, frozen=True):
    """The answer of `/api/tags` and `/api/ps`."""

    models: list[OllamaModel]


class OllamaShow(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/api/show`."""

    modelfile: str = ""
    parameters: str = ""
    template: str
    """The chat template that the server was started with, if any."""
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True):
    """The answer of `/api/version`."""

    version: str


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """The request of `/api/show`."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    """The request of `/api/pull`."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""
    stream: bool | None = None
    """By default true."""
    insecure: bool | None = None
    """It has no effect: the hub is asked as its library's variables say."""


class OllamaPullStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a download, or the answer to one that is not streamed."""

    status: str
    digest: str | UnsetType = UNSET
    """The file's, as "sha256:" and hexadecimal digits."""
    total: int | UnsetType = UNSET
    """The file's bytes."""
    completed: int | UnsetType = UNSET
    """The bytes that are here."""


class OllamaError(msgspec.Struct, frozen=True):
    """The body of an error answer."""

    error: str
