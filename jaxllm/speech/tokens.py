"""The special tokens of a Whisper's tokenizer, and the decoder's prompts that they make up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import Tokenizer

type Task = Literal["transcribe", "translate"]
"""Write what is said in its language, or in English."""

TIMESTAMP_SECONDS = 0.02
"""The time between two neighbouring timestamps."""
_MULTILINGUAL = 51_865
"""The vocabulary sizes from here on are those of models for many languages, as in OpenAI's code."""


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """What a Whisper's tokenizer says: the ids of its special tokens, and the text of others."""

    tokenizer: Tokenizer
    start: int
    """<|startoftranscript|>, which each prompt of the decoder has."""
    end: int
    """<|endoftext|>, the first special token: all lower ids are text."""
    previous: int
    """<|startofprev|>, which the text before a clip follows."""
    no_speech: int
    """The token that is likely at the beginning of a clip without speech."""
    no_timestamps: int
    first_timestamp: int
    """The timestamp of 0 s; those of later times follow it."""
    tasks: Mapping[str, int]
    languages: Mapping[str, int]
    """By code, such as "en"; none in a model for English alone, which has no tasks either."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> SpeechTokens:
        """Read a tokenizer. Raises VLLMValidationError for another model's."""
        ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}

        def find(*texts: str) -> int:
            for text in texts:
                if text in ids:
                    return ids[text]
            message = f"the tokenizer has no token {texts[0]}: it is not a Whisper's."
            raise VLLMValidationError(message, parameter="tokenizer", value=texts[0])

        start, no_timestamps = find("<|startoftranscript|>"), find("<|notimestamps|>")
        tasks = {task: find(f"<|{task}|>") for task in ("transcribe", "translate")}
        texts = {
            token_id: tokenizer.added_tokens.get(token_id, "") for token_id in range(start + 1, min(tasks.values()))
        }
        is_multilingual = vocab_size >= _MULTILINGUAL
        return cls(
            tokenizer=tokenizer,
            start=start,
            end=find("<|endoftext|>"),
            previous=find("<|startofprev|>"),
            no_speech=find("<|nospeech|>", "<|nocaptions|>"),
            no_timestamps=no_timestamps,
            first_timestamp=no_timestamps + 1,
            tasks=tasks if is_multilingual else {},
            languages={text[2:-2]: token_id for token_id, text in texts.items() if text} if is_multilingual else {},
        )

    def check_language(self, language: str | None, name: str = "language") -> str | None:
        """Return a language's code in lower case; None is to be detected, unless the model is for English alone.

        Raises VLLMValidationError, which names `name`, for a language that the model does not know.
        """
        known = self.languages or {"en": self.start}
        if language is None:
            return None if self.languages else "en"
        if (code := language.strip().lower()) not in known:
            message = f"{name} must be one of {', '.join(sorted(known))}, got {language[:40]!r}."
            raise VLLMValidationError(message, parameter=name, value=language[:40])
        return code

    def check_task(self, task: Task) -> None:
        """Raise VLLMValidationError for a task that the model does not have."""
        if task == "translate" and not self.tasks:
            message = "this model knows English alone, and does not translate: use one for many languages."
            raise VLLMValidationError(message, parameter="task", value=task)

    def text_before(self, text: str, most: int) -> list[int]:
        """Return the beginning of a prompt with the text before a clip, the last `most` tokens of it, as in HF's
        `get_prompt_ids`; nothing for a text of white space.

        Raises VLLMValidationError for a text with a special token in it.
        """
        text = self.tokenizer.reach(" " + text.strip(), most, "left")
        if not text.strip():
            return []
        [ids] = self.tokenizer.encode([text], add_special_tokens=False)
        special = next((token_id for token_id in ids if token_id >= self.end), None)
        if special is not None:
            shown = self.tokenizer.added_tokens.get(special, str(special))
            message = f"prompt must be text without special tokens, and has {shown}."
            raise VLLMValidationError(message, parameter="prompt", value=shown)
        return [self.previous, *ids[-most:]]

    def prompt(self, language: str, task: Task, *, has_timestamps: bool, before: Sequence[int] = ()) -> list[int]:
        """Return the decoder's prompt of a clip, with what `text_before` has returned at its beginning."""
        ids = [*before, self.start]
        if self.languages:
            ids += [self.languages[language], self.tasks[task]]
        return ids if has_timestamps else [*ids, self.no_timestamps]

    def language_of(self, token_id: int) -> str:
        """Return the code of a language's token."""
        return next(code for code, known in self.languages.items() if known == token_id)

    def seconds(self, token_id: int) -> float | None:
        """Return the time of a timestamp, in seconds from the clip's beginning; None for another token."""
        steps = token_id - self.first_timestamp
        return None if steps < 0 else round(steps * TIMESTAMP_SECONDS, 2)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return self.tokenizer.decode([token_id for token_id in ids if token_id < self.end], skip_special_tokens=True)
