"""Write transcripts as files: text, subtitles, tables and JSON, each as OpenAI's Whisper writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from jaxllm.speech.segments import Segment
from jaxllm.speech.transcription import Transcript


def write_txt(transcript: Transcript) -> str:
    """Return the text, a line for each segment."""
    return "".join(f"{segment.text.strip()}\n" for segment in transcript.segments)


def write_srt(transcript: Transcript) -> str:
    """Return subtitles in SubRip's form."""
    cues = enumerate(transcript.segments, 1)
    return "".join(f"{number}\n{_times(segment, ',', True)}\n{_cue_text(segment)}\n\n" for number, segment in cues)


def write_vtt(transcript: Transcript) -> str:
    """Return subtitles in WebVTT."""
    cues = (f"{_times(segment, '.', False)}\n{_cue_text(segment)}\n\n" for segment in transcript.segments)
    return "WEBVTT\n\n" + "".join(cues)


def write_tsv(transcript: Transcript) -> str:
    """Return a table with the times of segments in milliseconds."""
    rows = (
        f"{round(1000 * segment.start)}\t{round(1000 * segment.end)}\t{_on_one_line(segment.text)}\n"
        for segment in transcript.segments
    )
    return "start\tend\ttext\n" + "".join(rows)


def write_json(transcript: Transcript) -> str:
    """Return the text, the segments and the language in JSON."""
    segments = list(segment_records(transcript.segments))
    value = {"text": transcript.text, "segments": segments, "language": transcript.language}
    return msgspec.json.encode(value).decode() + "\n"


FORMATS: Mapping[str, Callable[[Transcript], str]] = {
    "txt": write_txt,
    "srt": write_srt,
    "vtt": write_vtt,
    "tsv": write_tsv,
    "json": write_json,
}
"""The functions that write transcripts, by the ending of a file's name."""


def segment_records(segments: Iterable[Segment]) -> Iterable[dict[str, Any]]:
    """Yield segments as records, with their words if they have some."""
    for number, segment in enumerate(segments):
        record: dict[str, Any] = {
            "id": number,
            "seek": round(100 * segment.clip_start),
            "start": round(segment.start, 3),
            "end": round(segment.end, 3),
            "text": segment.text,
            "tokens": segment.token_ids,
            "temperature": segment.temperature,
            "avg_logprob": segment.avg_logprob,
            "compression_ratio": segment.compression_ratio,
            "no_speech_prob": segment.no_speech_prob,
        }
        if segment.words is not None:
            record["words"] = [
                word._replace(start=round(word.start, 3), end=round(word.end, 3))._asdict() for word in segment.words
            ]
        yield record


def _times(segment: Segment, mark: str, has_hours: bool) -> str:
    return f"{_time(segment.start, mark, has_hours)} --> {_time(segment.end, mark, has_hours)}"


def _time(seconds: float, mark: str, has_hours: bool) -> str:
    """Return a time in hours, which may be left out, minutes, seconds and milliseconds."""
    rest, milliseconds = divmod(round(1000 * seconds), 1000)
    rest, seconds = divmod(rest, 60)
    hours, minutes = divmod(rest, 60)
    shown = f"{hours:02d}:" if has_hours or hours else ""
    return f"{shown}{minutes:02d}:{seconds:02d}{mark}{milliseconds:03d}"


def _cue_text(segment: Segment) -> str:
    return segment.text.strip().replace("-->", "->")


def _on_one_line(text: str) -> str:
    return text.strip().replace("\t", " ")
