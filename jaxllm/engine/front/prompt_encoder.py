"""Turn prompts into token ids: texts, pairs of texts, or ids, checked against the model."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.core_messages import Clip, PromptMedia
from jaxllm.engine.front.params_resolver import InputLimits, refusal
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.errors import MediaError
from jaxllm.params.checks import INT32_MAX, check_int, is_unicode, shown
from jaxllm.text.prompts import ParsedPrompt
from jaxllm.text.tokenizer import EncodeOptions, Tokenizer, encode_options

if TYPE_CHECKING:
    from jaxllm.media.items import ClipInput
    from jaxllm.media.reader import MediaReader
    from jaxllm.resolve.pooling_settings import PoolingSettings


class EncodedPrompt(NamedTuple):
    """A prompt as token ids, with its text if it was given as text."""

    token_ids: list[int]
    text: str | None
    salt: str | None
    """The salt of the prefix cache's keys."""
    pair_start: int | None = None
    """The position of the first token of a pair's second text; None for a single text."""
    media: PromptMedia | None = None
    """The images and videos of the prompt; None if it has none."""
    clip: Clip | None = None
    """What the decoder of an encoder-decoder attends to; None in other models."""


class PromptEncoder:
    """Tokenizes prompts, many in one call, or refuses them with an error that names the prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: InputLimits,
        pooling: PoolingSettings | None,
        media: MediaReader | None = None,
        clips: ClipInput | None = None,
    ) -> None:
        self._tokenizer, self._limits, self._pooling, self._media = tokenizer, limits, pooling, media
        self._clips = clips

    def encode(
        self, prompts: Sequence[ParsedPrompt], labels: Sequence[str], options: Mapping[str, Any] | None, *, pools: bool
    ) -> list[EncodedPrompt]:
        """Check prompts and tokenize all texts in one call; images are fetched and processed one prompt at a time."""
        how = encode_options(options, self._limits.max_model_len, outputs=0 if pools else 1)
        places = [i for i, prompt in enumerate(prompts) if prompt.token_ids is None and prompt.embeds is None]
        if places and self._tokenizer is None:
            message = "text needs a tokenizer; with `skip_tokenizer_init=True` pass {'prompt_token_ids': [...]}"
            raise refusal(labels[places[0]], message, "prompt", prompts[places[0]].text)
        encoded = {
            i: self._check_ids(self._given_ids(prompt.token_ids, how, labels[i]), labels[i])
            for i, prompt in enumerate(prompts)
            if prompt.token_ids is not None
        }
        for is_templated in (False, True):
            of_text = [i for i in places if prompts[i].pair is None and not prompts[i].media]
            rows = [i for i in of_text if prompts[i].is_templated is is_templated]
            adds_special = not is_templated if how.add_special_tokens is None else how.add_special_tokens
            # An encoder-decoder's tokenizer would end the prompt.
            adds_special = adds_special and self._clips is None
            encoded |= self._encode(prompts, rows, labels, how, adds_special, pools=pools)
        others = self._encode_pairs(prompts, labels, how)
        others |= {
            i: self._encode_embeds(prompt, how, labels[i])
            for i, prompt in enumerate(prompts)
            if prompt.embeds is not None
        }
        others |= {
            i: self._encode_media(prompt, encoded.get(i), how, labels[i])
            for i, prompt in enumerate(prompts)
            if prompt.media
        }
        all_encoded = [
            others[i] if i in others else self._encoded(prompt, encoded[i], how, labels[i])
            for i, prompt in enumerate(prompts)
        ]
        if self._clips is None:
            return all_encoded
        parts = zip(prompts, all_encoded, labels, strict=True)
        return [self._with_clip(prompt, encoded, label, self._clips) for prompt, encoded, label in parts]

    def _with_clip(self, prompt: ParsedPrompt, encoded: EncodedPrompt, label: str, clips: ClipInput) -> EncodedPrompt:
        """Return an encoder-decoder's prompt, which has its start token, with what it attends to."""
        if prompt.sound is None:
            message = "needs sound to attend to: send it as 'audio' in 'multi_modal_data'"
            raise refusal(label, message, "multi_modal_data", None)
        from jaxllm.media.audio.encoder_clips import read_clip  # which loads numpy

        ids = encoded.token_ids
        # Text may come before the start token, as Whisper's <|startofprev|> does.
        starts = [] if clips.start_token_id in ids else [clips.start_token_id]
        clip = read_clip(prompt.sound, clips, f"{label}['multi_modal_data']['audio']")
        return encoded._replace(token_ids=[*starts, *ids], clip=clip)

    def _encode_embeds(self, prompt: ParsedPrompt, how: EncodeOptions, label: str) -> EncodedPrompt:
        """Return a prompt of embeddings, with an id of 0 for each."""
        if not self._limits.embed_size:
            message = "'prompt_embeds' need an engine with enable_prompt_embeds=True (--enable-prompt-embeds)"
            raise refusal(label, message, "prompt_embeds", None)
        if how.keep is not None:
            message = "a prompt of embeddings is not cut: leave truncate_prompt_tokens out"
            raise refusal(label, message, "truncate_prompt_tokens", how.keep)
        from jaxllm.media.embeds.prompt import read_prompt_embeds  # which loads numpy

        try:
            media = read_prompt_embeds(prompt.embeds, self._limits.embed_size, self._limits.max_model_len - 1)
        except MediaError as error:
            message = f"prompt_embeds: {str(error).removesuffix('.')}"
            raise refusal(label, message, "prompt_embeds", None) from error
        return EncodedPrompt([0] * media.num_embeds, prompt.text, prompt.salt, media=media)

    def _encode_media(
        self, prompt: ParsedPrompt, token_ids: list[int] | None, how: EncodeOptions, label: str
    ) -> EncodedPrompt:
        """Return a prompt with images, each placeholder in it as the tokens that take the image's rows."""
        if self._media is None:
            message = "images need a tokenizer: the engine was made with `skip_tokenizer_init=True`"
            raise refusal(label, message, "multi_modal_data", None)
        if how.keep is not None:
            message = "a prompt with images is not cut: leave truncate_prompt_tokens out"
            raise refusal(label, message, "truncate_prompt_tokens", how.keep)
        text = self._text(prompt.text, label, how) if token_ids is None else None
        adds_special = not prompt.is_templated if how.add_special_tokens is None else how.add_special_tokens
        source = text if token_ids is None else token_ids
        assert source is not None
        ids, media = self._media.read(
            source, prompt.media, prompt.processor_options, prompt.sampling, add_special_tokens=adds_special
        )
        return EncodedPrompt(self._check_ids(ids, label), prompt.text, prompt.salt, media=media)

    def _encoded(self, prompt: ParsedPrompt, token_ids: list[int], how: EncodeOptions, label: str) -> EncodedPrompt:
        start = None
        if prompt.type_ids is not None:
            if any(prompt.type_ids) and not self._has_types:
                raise refusal(
                    label,
                    "token_type_ids: the model tells no texts apart; leave them out",
                    "token_type_ids",
                    shown(prompt.type_ids),
                )
            start = self._pair_start(how.cut(list(prompt.type_ids), self._tokenizer), label)
        return EncodedPrompt(how.cut(token_ids, self._tokenizer), prompt.text, prompt.salt, start)

    def _encode_pairs(
        self, prompts: Sequence[ParsedPrompt], labels: Sequence[str], how: EncodeOptions
    ) -> dict[int, EncodedPrompt]:
        """Return the pairs of texts among the prompts as token ids."""
        rows = [i for i, prompt in enumerate(prompts) if prompt.pair is not None]
        if not rows or self._tokenizer is None:
            return {}
        pairs = [
            (self._text(prompts[i].text, labels[i], how), self._text(prompts[i].pair, labels[i], how)) for i in rows
        ]
        special = how.add_special_tokens is not False
        encoded = self._tokenizer.encode_pairs(pairs, add_special_tokens=special, keep=how.keep, side=how.side)
        encoded_prompts: dict[int, EncodedPrompt] = {}
        for i, both in zip(rows, encoded, strict=True):
            ids, type_ids = (how.cut(each, self._tokenizer) for each in both)  # the special tokens alone may be more
            start = self._pair_start(type_ids, labels[i])
            encoded_prompts[i] = EncodedPrompt(self._check_ids(ids, labels[i]), None, prompts[i].salt, start)
        return encoded_prompts

    def _pair_start(self, type_ids: Sequence[Any], label: str) -> int | None:
        """Return the position of the first token of the second text; None for a model that tells no texts apart."""
        start = next((i for i, type_id in enumerate(type_ids) if type_id), len(type_ids))
        if any(type_id != (i >= start) for i, type_id in enumerate(type_ids)):
            message = "must be 0 for the tokens of the first text, then 1 for those of the second"
            raise refusal(label, f"token_type_ids {message}", "token_type_ids", shown(type_ids))
        return start if self._has_types and start < len(type_ids) else None

    @property
    def _has_types(self) -> bool:
        return self._pooling is not None and self._pooling.has_token_types

    def _encode(
        self,
        prompts: Sequence[ParsedPrompt],
        rows: list[int],
        labels: Sequence[str],
        how: EncodeOptions,
        add_special_tokens: bool,
        *,
        pools: bool,
    ) -> dict[int, list[int]]:
        """Return the token ids of the texts in `rows`."""
        if self._tokenizer is None:
            return {}
        texts = [self._text(prompts[i].text, labels[i], how) for i in rows]
        # The tokenizer keeps its special tokens where it cuts: outputs are pooled from them. In other prompts,
        # all tokens are cut alike where the request names a side.
        keep = how.keep if how.side is None or pools else None
        ids = self._tokenizer.encode(texts, add_special_tokens=add_special_tokens, keep=keep, side=how.side)
        return {i: self._check_ids(each, labels[i]) for i, each in zip(rows, ids, strict=True)}

    def _given_ids(self, token_ids: Any, how: EncodeOptions, label: str) -> Any:
        """Return the ids of a prompt that may be kept: there may be millions of others, which are not looked at."""
        if how.keep is not None:
            return how.cut(token_ids, self._tokenizer)
        if len(token_ids) > (limit := self._limits.max_model_len):
            raise too_long(limit, label, len(token_ids), f"{len(token_ids)} input tokens")
        return token_ids

    def _check_ids(self, token_ids: Sequence[Any] | None, label: str) -> list[int]:
        """Return the ids as plain ints within the vocabulary; at least one."""
        if token_ids is not None and len(token_ids) == 0 and self._clips is not None:
            return []  # its start token is added
        if token_ids is None or len(token_ids) == 0:
            raise refusal(label, "The decoder prompt cannot be empty; it needs at least one token", "prompt", token_ids)
        ids = list(token_ids)
        if set(map(type, ids)) != {int}:
            ids = [_as_int(token_id, label, i) for i, token_id in enumerate(ids)]
        if min(ids) < 0 or max(ids) >= self._limits.vocab_size:
            i = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < self._limits.vocab_size)
            message = f"Token id {shown(ids[i])} is out of vocabulary, at position {i}"
            message += f": the model has {self._limits.vocab_size} tokens"
            raise refusal(label, message, "prompt_token_ids", ids[i])
        return ids

    def _text(self, prompt: str | None, label: str, how: EncodeOptions) -> str:
        """Return a text as the model is to get it, no more of it than may be kept: to tokenize millions of characters
        takes minutes.
        """
        text = prompt or ""
        if not is_unicode(text):
            raise refusal(label, "the text has lone surrogates, which are not Unicode", "prompt", shown(text))
        if self._pooling is not None and self._pooling.lowercases:
            text = text.lower()
        if self._tokenizer is not None:
            if how.keep is None:
                self._check_characters(text, self._tokenizer, label)
            else:
                text = self._tokenizer.reach(text, how.keep, how.side)
        return text

    def _check_characters(self, text: str, tokenizer: Tokenizer, label: str) -> None:
        """Refuse a text that must be too long whatever its tokens are."""
        limit = self._limits.max_model_len
        if len(text) > limit and len(text) > (most := limit * tokenizer.longest_token):
            upper = f"more than {most}, which is the upper bound for {limit} tokens"
            raise too_long(self._limits.max_model_len, label, len(text), f"{len(text)} characters ({upper})")


def too_long(limit: int, label: str, length: int, contents: str) -> VLLMValidationError:
    """Make the error for a prompt that does not fit the context."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {contents}. Please "
        "reduce the length of the input prompt, or start the engine with a larger max_model_len"
    )
    return refusal(label, message, "prompt", length)


def _as_int(value: object, label: str, position: int) -> int:
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        with contextlib.suppress(TypeError):  # arrays have an index only if they hold one integer
            return operator.index(value)  # type: ignore[arg-type]
    message = f"token ids must be integers, got {shown(value)} ({type(value).__name__}) at position {position}"
    raise refusal(label, message, "prompt_token_ids", value)


def align_arguments(prompt: EncodedPrompt, token_ids: Iterable[int]) -> tuple[Clip, list[int], list[int]]:
    """Return the arguments of `Core.align` for the tokens after an encoder-decoder's prompt.

    Raises VLLMValidationError for a prompt of another model, and for what are no numbers.
    """
    if prompt.clip is None:
        message = "the model takes no sound, with which tokens could be aligned."
        raise VLLMValidationError(message, parameter="prompt")
    return prompt.clip, prompt.token_ids, [check_int("token_ids", each, 0, INT32_MAX) for each in token_ids]
