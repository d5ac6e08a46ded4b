"""`PoolingSettings`: the settings of pooling that both front end and core need."""

from __future__ import annotations

import msgspec

from jaxllm.core_messages import TokenOutput
from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.request import LoRARequest, task_request

STEP_FIELDS = ("step_tag_id", "returned_token_ids")


class TextForm(msgspec.Struct, frozen=True):
    """How a text becomes the tokens of a query or of a document of late interaction, and which of them count."""

    prompt: str = ""
    """The text that is put before it."""
    mark_id: int | None = None
    """The token that is inserted after the first one."""
    max_tokens: int | None = None
    """The most tokens, the mark included; None for as many as the model takes."""
    filled_to: int = 0
    """The number of tokens up to which `filler_id` follows a shorter text."""
    filler_id: int | None = None
    skipped_ids: tuple[int, ...] = ()
    """The tokens that do not count in scores."""
    strips: bool = False
    """Prompt and text are read without the blanks around them."""


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settled settings of pooling: plain data, which can be sent to another process."""

    model: str
    """The first of the model's served names, for error messages."""
    tasks: tuple[str, ...]
    """The tasks that requests may have."""
    activation: str
    """What `use_activation` does to outputs: "normalize", "sigmoid", "softmax" or "none"."""
    use_activation: bool
    """The default of requests; so are the next fields."""
    dimensions: int | None
    step_tag_id: int | None
    returned_token_ids: list[int] | None
    is_step: bool
    """True if token tasks may return some outputs only: requests may have `step_tag_id` and `returned_token_ids`."""
    logit_mean: float
    logit_sigma: float
    """Scores of classes become (score - logit_mean) / logit_sigma before their activation."""
    has_linear_head: bool
    """True if only matmuls follow the model's hidden states, so that the mean may come before or after them."""
    output_size: int
    """The size of one output, before `dimensions` cuts it."""
    num_labels: int | None
    """The number of classes; None for embeddings."""
    id2label: dict[str, str]
    """The classes by name; empty for embeddings."""
    is_matryoshka: bool
    """True if requests may cut embeddings to fewer dimensions."""
    matryoshka_dimensions: list[int] | None
    """The allowed numbers of dimensions; None for all."""
    prompts: dict[str, str]
    """The prompts that are put before a text, by name."""
    default_prompt_name: str | None
    similarity: str
    """The similarity of embeddings: "cosine", "dot", "euclidean" or "manhattan"; of token embeddings "maxsim", or
    "meanmaxsim", its mean over the query's tokens."""
    score_type: str | None
    """How pairs of texts are scored: "cross-encoder", "bi-encoder" or "late-interaction"; None if not at all."""
    has_token_types: bool
    """True if tokens have a type: 1 in the second text of a pair, else 0."""
    runs_whole_tasks: tuple[str, ...]
    """The tasks that run each prompt in one step."""
    lowercases: bool
    """True if texts are lowercased before they are tokenized."""
    query_form: TextForm | None = None
    document_form: TextForm | None = None
    """How the texts of a ColBERT model are tokenized for scores; None where each is a prompt as it stands."""
    token_outputs: dict[str, TokenOutput] = {}
    """The outputs of tasks of tokens that have heads of their own, by task."""
    adapter_names: tuple[str, ...] = ()
    """The prompts that come with an adapter in the model's own checkpoint."""

    def prompt(self, name: str | None = None) -> str:
        """Return the prompt that is put before a text: the named one, or the default, which may be empty.

        Raises VLLMValidationError for a name that the checkpoint does not have.
        """
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            message = f"prompt_name={name!r}: the checkpoint has no such prompt; it has {known}."
            raise VLLMValidationError(message, parameter="prompt_name", value=name)
        return self.prompts[name]

    def adapter[T](self, name: str | None, others: T, parameter: str) -> LoRARequest | T:
        """Return the adapter that comes with a prompt, the named one or the default, or else the request's `others`.

        Raises VLLMValidationError, about `parameter`, if the prompt has one and the request names others.
        """
        name = self.default_prompt_name if name is None else name
        known = task_request(self.adapter_names, name)
        if known is not None and others is not None:
            chosen = repr(others.lora_name) if isinstance(others, LoRARequest) else "one for each prompt"
            message = f"the prompt {name!r} has an adapter of its own, and the request has another, {chosen}."
            raise VLLMValidationError(f"{parameter}: {message} Leave out one of both.", parameter=parameter)
        return others if known is None else known

    @property
    def runs_whole(self) -> bool:
        """Return whether all prompts run in one step."""
        return set(self.tasks) <= set(self.runs_whole_tasks)


def check_dimensions(dimensions: int, settings: PoolingSettings, parameter: str) -> None:
    """Refuse dimensions that the model's embeddings cannot be cut to, in vLLM's words."""
    model, known, message = f"Model {settings.model!r}", settings.matryoshka_dimensions, None
    if not settings.is_matryoshka:
        message = "does not support Matryoshka embeddings; dimensions must be unset (received dimensions={})."
    elif not 1 <= dimensions <= settings.output_size:
        message = f"only supports dimensions in range [1, {settings.output_size}], got {{}}."
    elif known is not None and dimensions not in known:
        message = f"only supports Matryoshka dimensions {known}, got {{}}."
    if message is not None:
        text = f"{model} {message.format(dimensions)}"
        raise VLLMValidationError(text, parameter=parameter, value=dimensions)


def check_returned(returned: list[int] | None, settings: PoolingSettings, parameter: str) -> None:
    """Refuse indices that an output does not have."""
    if returned and max(returned) >= settings.output_size:
        message = f"returned_token_ids has {max(returned)}, and an output has {settings.output_size} numbers."
        raise VLLMValidationError(message, parameter=parameter, value=returned)
