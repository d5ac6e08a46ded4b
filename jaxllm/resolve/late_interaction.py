"""Settle how a ColBERT model's queries and documents become tokens, by its files and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.pooling_settings import TextForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxllm.loading import late_interaction
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.loading.sentence_transformers import SentenceFiles
    from jaxllm.models.config import ModelConfig


class TextForms(NamedTuple):
    """The forms of both sides; None where each text is a prompt as it stands."""

    query: TextForm | None = None
    document: TextForm | None = None
    unseen_id: int | None = None
    """The filler of queries, if no token attends to it; else None."""


def find_forms(
    files: SentenceFiles, hf_config: Mapping[str, Any], checkpoint: Checkpoint, model_config: ModelConfig
) -> TextForms:
    """Return the forms that a checkpoint's files name. Raises VLLMValidationError for some that cannot be had."""
    from jaxllm.loading.late_interaction import read_late_interaction

    late = read_late_interaction(files, hf_config)
    if late is None:
        return TextForms()
    tokenizer, source = checkpoint.tokenizer(), checkpoint.source
    query, document = (_with_ids(form, tokenizer, source) for form in (late.query, late.document))
    if not query.filled_to:
        return TextForms(query, document)
    filler_id = _filler_id(late.filler, tokenizer, source)
    query = msgspec.structs.replace(query, filler_id=filler_id)
    if late.attends:
        return TextForms(query, document)
    if any(layer.latent is not None for layer in model_config.layers):
        message = "it fills up queries with tokens that are not attended to, which attention over latents lacks"
        raise _error(message, source)
    return TextForms(query, document, filler_id)


def _with_ids(form: late_interaction.TextForm, tokenizer: PreTrainedTokenizerFast, source: str) -> TextForm:
    vocab = tokenizer.get_vocab()
    # PyLate asks the tokenizer, which gives its unknown token; sentence-transformers skips known words alone.
    unknown_id = tokenizer.unk_token_id if form.skips_unknown else None
    skipped = [vocab.get(word, unknown_id) for word in form.skipped]
    return TextForm(
        prompt=form.prompt,
        mark_id=_token_id(form.mark, tokenizer, source) if form.mark else None,
        max_tokens=form.max_tokens,
        filled_to=form.filled_to,
        skipped_ids=tuple(sorted({token_id for token_id in skipped if isinstance(token_id, int)})),
        strips=form.strips,
    )


def _filler_id(name: str | None, tokenizer: PreTrainedTokenizerFast, source: str) -> int:
    if name is not None:
        return _token_id(name, tokenizer, source)
    known = tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    filler_id = next((each for each in known if isinstance(each, int)), None)
    if filler_id is None:
        raise _error("its tokenizer has no mask_token, eos_token or pad_token to fill up queries with", source)
    return filler_id


def _token_id(name: str, tokenizer: PreTrainedTokenizerFast, source: str) -> int:
    token_id = tokenizer.get_vocab().get(name)
    if token_id is None:
        raise _error(f"{name[:100]!r}, which marks or fills up its texts, is no token of its tokenizer", source)
    return token_id


def _error(message: str, source: str) -> VLLMValidationError:
    way_out = "Set skip_tokenizer_init=True to encode token ids alone, without scores"
    return VLLMValidationError(f"{source}: {message}. {way_out}.", parameter="model", value=source)
