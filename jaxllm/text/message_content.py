"""Lay out a message's texts and media in the form of content that a chat template reads."""

from __future__ import annotations

from typing import Any

from jaxllm.media.items import MediaPart, MediaSettings, Modality

type Content = str | list[str | MediaPart] | None
"""A message's checked content: a text, a list of texts and media, or none."""


def lay_out(
    content: Content, role: str, form: str, media: MediaSettings | None, *, knows_videos: bool = True
) -> str | list[dict[str, Any]]:
    """Return content in the "string" or the "openai" form (a list of parts), or as "given", where tools' results are
    strings unless they have media.

    A video's placeholder is a text for a template that does not know videos.
    """
    items = media_of(content)
    keeps_parts = form == "given" and isinstance(content, list) and (role != "tool" or bool(items))
    if form == "openai" or keeps_parts:
        pieces = content if isinstance(content, list) else [] if content is None else [content]
        mark = None if media is None or knows_videos else media.placeholder("video")
        texts = [mark if isinstance(p, MediaPart) and p.modality == "video" else p for p in pieces] if mark else pieces
        return [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.modality} for p in texts]
    return _with_placeholders(content, items, media) if items and media is not None else text_of(content)


def text_of(content: Content) -> str:
    """Return the texts of content in lines."""
    if isinstance(content, list):
        return "\n".join(piece for piece in content if isinstance(piece, str))
    return content or ""


def media_of(content: Content) -> list[MediaPart]:
    """Return the media of content in their order."""
    return [piece for piece in content if isinstance(piece, MediaPart)] if isinstance(content, list) else []


def with_media(text: str, *contents: Content) -> Content:
    """Return content that has a text after the media of other contents; the text alone if they have none."""
    media = [part for content in contents for part in media_of(content)]
    return [*media, text] if media else text


def _with_placeholders(content: Content, items: list[MediaPart], media: MediaSettings) -> str:
    """Return the texts in lines with a placeholder for each item: where the items are if they are interleaved, else in
    front, by modality.
    """
    marks: dict[Modality, str] = {part.modality: media.placeholder(part.modality) or "" for part in items}
    if media.interleave_mm_strings and isinstance(content, list):
        return "\n".join(piece if isinstance(piece, str) else marks[piece.modality] for piece in content)
    before = [mark for modality, mark in marks.items() for part in items if part.modality == modality]
    text = text_of(content)
    return "\n".join([*before, text] if text else before)
