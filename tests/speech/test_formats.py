"""Files of transcripts, against texts that were written by hand after those of OpenAI's Whisper."""

from __future__ import annotations

import json

from jaxllm.speech.formats import FORMATS
from jaxllm.speech.segments import Segment, Word, compression_ratio
from jaxllm.speech.transcription import Transcript


def segment(start: float, end: float, text: str, words: list[Word] | None = None) -> Segment:
    return Segment(start, end, text, [50_364, 1, 50_400], 30.0, 0.2, -0.25, 1.5, 0.125, words)


TRANSCRIPT = Transcript(
    "en",
    "transcribe",
    3700.0,
    [
        segment(0.0, 1.5, " Hello there."),
        segment(59.9996, 61.02, " It goes A --> B."),
        segment(3661.5, 3662.045, " Tab\there.", [Word(" Tab\there.", 3661.5, 3662.0, 0.5)]),
    ],
    "Hello there. It goes A --> B. Tab\there.",
)

SRT = """\
1
00:00:00,000 --> 00:00:01,500
Hello there.

2
00:01:00,000 --> 00:01:01,020
It goes A -> B.

3
01:01:01,500 --> 01:01:02,045
Tab\there.

"""

VTT = """\
WEBVTT

00:00.000 --> 00:01.500
Hello there.

01:00.000 --> 01:01.020
It goes A -> B.

01:01:01.500 --> 01:01:02.045
Tab\there.

"""

TXT = """\
Hello there.
It goes A --> B.
Tab\there.
"""

TSV = """\
start\tend\ttext
0\t1500\tHello there.
60000\t61020\tIt goes A --> B.
3661500\t3662045\tTab here.
"""


def test_texts() -> None:
    for name, expected in {"srt": SRT, "vtt": VTT, "txt": TXT, "tsv": TSV}.items():
        assert FORMATS[name](TRANSCRIPT) == expected


def test_nothing_said() -> None:
    silent = Transcript("en", "transcribe", 1.0, [], "")
    assert {name: write(silent) for name, write in FORMATS.items() if name != "json"} == {
        "srt": "",
        "vtt": "WEBVTT\n\n",
        "txt": "",
        "tsv": "start\tend\ttext\n",
    }


def test_json() -> None:
    written = json.loads(FORMATS["json"](TRANSCRIPT))
    assert written.keys() == {"text", "segments", "language"}
    assert (written["text"], written["language"]) == (TRANSCRIPT.text, "en")
    assert written["segments"][0] == {
        "id": 0,
        "seek": 3000,
        "start": 0.0,
        "end": 1.5,
        "text": " Hello there.",
        "tokens": [50_364, 1, 50_400],
        "temperature": 0.2,
        "avg_logprob": -0.25,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.125,
    }
    assert written["segments"][2]["words"] == [
        {"word": " Tab\there.", "start": 3661.5, "end": 3662.0, "probability": 0.5}
    ]


def test_a_text_that_repeats_itself_is_compressed_well() -> None:
    assert compression_ratio("no " * 100) > 2.4 > compression_ratio("The quick brown fox jumps over the lazy dog.")
    assert compression_ratio("") == 0
