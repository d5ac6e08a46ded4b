"""Render conversations to prompts: check OpenAI's messages and convert them for chat templates."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxllm.config.formats import CONTENT_FORMATS
from jaxllm.exceptions import ChatTemplateResolutionError, VLLMValidationError
from jaxllm.media.content_parts import kind_of, read_media_part
from jaxllm.media.items import MediaPart, MediaSettings, refusal, video_sampling
from jaxllm.params.checks import check_bool, check_choice, check_kind, check_options, shown
from jaxllm.text.message_content import Content, lay_out, media_of, text_of, with_media
from jaxllm.text.prompts import ParsedPrompt, check_media_options, text_only_reason
from jaxllm.text.template_limits import TemplateLimitError
from jaxllm.text.templates import REASONING_FIELDS, ChatTemplates
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tool_prompt import has_calls, knows_tools, tell_tools

logger = logging.getLogger(__name__)

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The key of the text in each type of content part."""
SYSTEM_ROLES = ("system", "developer")
_RESERVED = frozenset(
    {"conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs"}
)
"""Names refused as template variables: they would change what rendering returns, or replace the template."""
_BRIEF_SECONDS = 0.02
"""The time limit for a render on the event loop."""
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(\n+|\Z)", re.MULTILINE)
"""The line that begins Claude Code's system text. It differs in each request, which would defeat prefix caching."""
_MAX_ERROR = 1000
"""The maximum length of a template's own error message."""


class ChatRenderer:
    """Renders conversations with the tokenizer's chat template or another."""

    def __init__(self, tokenizer: Tokenizer, default_template: str | None, media: MediaSettings | None = None) -> None:
        """Take the media that `media` allows; none if it is None."""
        self._tokenizer = tokenizer
        self._default = default_template
        self._media = media
        self._templates, self._brief_templates = ChatTemplates(), ChatTemplates(_BRIEF_SECONDS)

    def render(
        self,
        conversation: Any,
        label: str,
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        is_brief: bool = False,
    ) -> ParsedPrompt:
        """Return the prompt's text, special tokens included, with its media in order of appearance, which are not
        fetched. Errors name the message as in "messages[2]".

        With `is_brief` it takes at most _BRIEF_SECONDS, else raises TemplateLimitError.
        """
        check_choice("chat_template_content_format", content_format, CONTENT_FORMATS)
        _check_end(add_generation_prompt, continue_final_message)
        check_kind("chat_template", chat_template, str)
        _check_tools(tools)
        media_options = self._media_options(mm_processor_kwargs, media_io_kwargs)
        options = check_options("chat_template_kwargs", chat_template_kwargs)
        for name in options:
            if name in _RESERVED:
                message = f"chat_template_kwargs must not contain {name!r}; pass what the method itself takes for it."
                raise VLLMValidationError(message, parameter="chat_template_kwargs", value=name)
        templates = self._brief_templates if is_brief else self._templates
        with _refusals(label, conversation, raises_limit=is_brief):
            source = self._source(chat_template, tools)
            template = templates.get(source)
            form = template.content_format if content_format == "auto" else content_format
            messages = _parse_conversation(conversation, label, self._media)
            if not knows_tools(source) and (tools or has_calls(conversation)):
                messages, tools = tell_tools(messages, tools or ()), None
            if not template.names_developer:
                messages = _with_one_system_message(messages)
            media = tuple(part for message in messages for part in media_of(message["content"]))
            if self._media is not None:
                self._media.check_counts(media, "messages")
            lay = partial(lay_out, form=form, media=self._media, knows_videos="video" in source)
            text = template.render(
                [{**each, "content": lay(each["content"], each["role"])} for each in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._tokenizer.parts.special_tokens, **options},
            )
        if self._media is not None:
            self._media.check_rendered(text, media, label)
        return ParsedPrompt(text, is_templated=True, media=media, **media_options)

    def _media_options(self, processor_options: Any, io_options: Any) -> dict[str, Any]:
        """Return options of media as the fields of ParsedPrompt."""
        named = {"mm_processor_kwargs": processor_options, "media_io_kwargs": io_options}
        check_media_options(named, self._media)
        checked = check_options("mm_processor_kwargs", processor_options)
        return {"processor_options": checked or None, "sampling": video_sampling(io_options) or None}

    def _source(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:
        """Return the template's text: the argument, the one that it names, the default, or the tokenizer's."""
        template = chat_template if chat_template is not None else self._default
        if template is not None and "{" in template:
            return template
        templates = self._tokenizer.parts.chat_template
        named = templates if isinstance(templates, Mapping) else {}
        if template is not None and template not in named:
            message = (
                f"chat_template={shown(template)} is neither a Jinja template nor the name of one that the model has."
            )
            raise ChatTemplateResolutionError(message, parameter="chat_template", value=template)
        if isinstance(templates, str):
            return templates
        name = template or ("tool_use" if tools is not None and "tool_use" in named else "default")
        if name not in named:
            names = f" but those named {', '.join(map(repr, named))}" if named else ""
            message = (
                f"the tokenizer has no chat template{names}: pass chat_template (--chat-template), or use generate()."
            )
            raise ChatTemplateResolutionError(message, parameter="chat_template", value=template)
        return named[name]


@contextmanager
def _refusals(label: str, conversation: Any, *, raises_limit: bool) -> Iterator[None]:
    """Convert a template's exceptions to errors for the caller."""
    try:
        yield
    except VLLMValidationError:
        raise
    except TemplateLimitError as error:
        if raises_limit:
            raise
        message = f"{label}: rendering the chat template was stopped: {error}. Shorten the messages, or the template."
        raise VLLMValidationError(message, parameter="chat_template", value=shown(conversation)) from error
    except Exception as error:  # a template is a program and may fail in any way
        message = f"{label}: the chat template refused the conversation ({str(error)[:_MAX_ERROR]})."
        raise VLLMValidationError(message, parameter="messages", value=shown(conversation)) from error


def _check_end(add_generation_prompt: Any, continue_final_message: Any) -> None:
    """Raise an error for options of a prompt's end that are no switches, or that exclude each other."""
    check_bool("add_generation_prompt", add_generation_prompt)
    check_bool("continue_final_message", continue_final_message)
    if add_generation_prompt and continue_final_message:
        raise VLLMValidationError(
            "continue_final_message=True goes on with the last message: pass add_generation_prompt=False with it.",
            parameter="continue_final_message",
            value=True,
        )


def _check_tools(tools: Any) -> None:
    """Raise an error for tools that are not a list of dicts."""
    if tools is None or (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
        return
    message = f"tools must be a list of dicts, got {shown(tools)} ({type(tools).__name__})."
    raise VLLMValidationError(message, parameter="tools", value=tools)


def is_single_conversation(messages: Any) -> bool:
    """Return whether `messages` is one conversation and not a batch of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        message = f"messages must be a list of messages, or a list of such lists; got {shown(messages)}."
        raise VLLMValidationError(message, parameter="messages", value=messages)
    return len(messages) > 0 and not isinstance(messages[0], (list, tuple))


def _parse_conversation(conversation: Any, label: str, media: MediaSettings | None) -> list[dict[str, Any]]:
    """Return copies of the messages with checked content (see Content). Fields get the names that templates read, and
    fields without a value are left out.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, (str, bytes)) or not conversation:
        message = f"{label}: a conversation is a list of at least one message, got {shown(conversation)}."
        raise VLLMValidationError(message, parameter="messages", value=conversation)
    broken: list[str] = []
    messages = [_parse_message(message, f"{label}[{i}]", media, broken) for i, message in enumerate(conversation)]
    if broken:
        text = "%s: 'arguments' is not a JSON object, as in %d calls in all: the template is given {}"
        logger.warning(text, broken[0], len(broken))
    return [message for message in messages if message is not None] or [{"role": "system", "content": None}]


def _parse_message(message: Any, label: str, media: MediaSettings | None, broken: list[str]) -> dict[str, Any] | None:
    """Return a message's copy; None if it only had Claude Code's billing header.

    The positions of calls with unreadable arguments are added to `broken`.
    """
    if not isinstance(message, Mapping):
        raise VLLMValidationError(
            f"{label}: must be a dict, got {shown(message)}.", parameter="messages", value=message
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise VLLMValidationError(f"{label}: needs a 'role'.", parameter="messages", value=role)
    content = _parse_content(message.get("content"), f"{label}['content']", media)
    if role in SYSTEM_ROLES and content:
        content = _without_header(content)
        if not content:
            return None
    parsed = {name: value for name, value in message.items() if value is not None}
    parsed["content"] = content
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_tool_calls(parsed["tool_calls"], f"{label}['tool_calls']", broken)
        if not parsed["tool_calls"]:  # templates take an empty list for calls
            del parsed["tool_calls"]
    reasoning = next((parsed[name] for name in REASONING_FIELDS if name in parsed), None)
    if reasoning is not None:
        parsed |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return parsed


def _without_header(content: str | list[str | MediaPart]) -> Content:
    """Return the system's content without Claude Code's billing header."""
    if isinstance(content, str):
        return "".join(without_billing([content]))
    kept: list[str | MediaPart] = []
    for piece in content:
        kept += without_billing([piece]) if isinstance(piece, str) else [piece]
    return kept


def without_billing(texts: Iterable[str]) -> list[str]:
    """Return the system's texts without Claude Code's billing header, and without texts that only had it."""
    parts = []
    for text in texts:
        rest = _BILLING.sub("", text)
        if rest or not text:
            parts.append(rest)
    return parts


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with developer messages joined into the system message, which comes first."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    said = [message for message in messages if message["role"] in SYSTEM_ROLES]
    first = {**said[0], "role": "system"}
    first.pop("tools", None)
    if len(said) > 1:
        contents = [message["content"] for message in said]
        text = with_media("\n\n".join(filter(None, map(text_of, contents))), *contents)
        first["content"] = [text] if isinstance(text, str) and isinstance(contents[0], list) else text
    return [first, *(message for message in messages if message["role"] not in SYSTEM_ROLES)]


def _parse_content(content: Any, label: str, media: MediaSettings | None) -> Content:
    if content is None:
        return None
    if isinstance(content, str):
        return _checked(content, label, media)
    if not isinstance(content, Sequence):
        message = f"{label}: must be a str or a list of parts, got {shown(content)}."
        raise VLLMValidationError(message, parameter="messages", value=content)
    return [_parse_part(part, f"{label}[{i}]", media) for i, part in enumerate(content)]


def _parse_part(part: Any, label: str, media: MediaSettings | None) -> str | MediaPart:
    """Return the text of a part, or the record of its image or video. APIs with other messages bring these as records,
    which name the position in their own request.
    """
    if isinstance(part, str):
        return _checked(part, label, media)
    if isinstance(part, MediaPart):
        if reason := text_only_reason(media):
            raise refusal(part.label, f"{part.modality}s are not supported: {reason}", part.modality)
        return part
    kind = kind_of(part) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        message = f"{label}: a part is a dict with 'type' and 'text', got {shown(part)}."
        raise VLLMValidationError(message, parameter="messages", value=part)
    if kind not in _TEXT_PARTS:
        if reason := text_only_reason(media):
            raise refusal(label, f"parts of type {kind!r} are not supported: {reason}", kind)
        return read_media_part(part, label)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        message = f"{label}: needs {_TEXT_PARTS[kind]!r} as a str, got {shown(text)}."
        raise VLLMValidationError(message, parameter="messages", value=text)
    return _checked(text, label, media)


def _checked(text: str, label: str, media: MediaSettings | None) -> str:
    """Return a text that does not stand for media."""
    if media is not None:
        media.check_text(text, label)
    return text


def _parse_tool_calls(calls: Any, label: str, broken: list[str]) -> list[Any]:
    """Return the calls with their arguments as dicts for templates; OpenAI's are JSON text."""
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise VLLMValidationError(f"{label}: must be a list, got {shown(calls)}.", parameter="messages", value=calls)
    parsed: list[Any] = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            message = f"{label}[{i}]: a tool call is a dict with 'function', got {shown(call)}."
            raise VLLMValidationError(message, parameter="messages", value=call)
        arguments = _parse_arguments(function.get("arguments"))
        if arguments is None:
            broken.append(f"{label}[{i}]")
        parsed.append({**call, "function": {**function, "arguments": arguments or {}}})
    return parsed


def _parse_arguments(arguments: Any) -> Mapping[str, Any] | None:
    """Return a call's arguments; None if they are not an object.

    A call cut short by max_tokens has such arguments. It is in the history, where nobody can correct it, so it must
    not end the conversation.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, Mapping) else None
