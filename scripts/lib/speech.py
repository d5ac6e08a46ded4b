"""Speech to transcribe: sentences in five languages, spoken by espeak-ng."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import soundfile

from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.decode import decode_audio

RATE = 16_000
SENTENCES = {
    "en": (
        "The ferry to the island leaves at a quarter past seven, unless the wind comes from the north.",
        "She counted forty two boxes in the cellar, and three of them were empty.",
        "Please close the window before it begins to rain.",
        "A good library explains itself in the first ten lines of its manual.",
        "The old bridge was painted green again last summer, as it had been before the war.",
        "Nobody knew who had left the umbrella beside the piano.",
        "In the morning the market smells of bread, coffee and wet stones.",
    ),
    "de": (
        "Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung.",
        "Im Garten stehen drei alte Apfelbäume und eine Bank aus Holz.",
        "Kannst du mir bitte sagen, wo der Schlüssel liegt?",
        "Gestern haben wir bis spät in die Nacht über Musik gesprochen.",
        "Das Wetter wird am Wochenende wieder wärmer.",
    ),
    "fr": (
        "Le musée est fermé le lundi, mais le jardin reste ouvert.",
        "Nous avons acheté du pain, du fromage et une bouteille de vin.",
        "Mon frère habite à Lyon depuis plus de dix ans.",
        "Pourriez-vous parler un peu plus lentement, s'il vous plaît ?",
        "La nuit tombe tôt en hiver dans cette vallée.",
    ),
    "es": (
        "El tren sale de la estación a las ocho y media de la mañana.",
        "Mi abuela cocina muy bien y siempre canta en la cocina.",
        "Ayer llovió tanto que no pudimos salir de casa.",
        "¿Dónde puedo comprar un mapa de la ciudad?",
        "Los niños juegan en la plaza después de la escuela.",
    ),
    "it": (
        "Domani andiamo al mare con tutta la famiglia.",
        "Il caffè è pronto, ma non c'è più zucchero.",
        "Abito in una piccola casa vicino alla stazione.",
        "Mi piace leggere il giornale la mattina presto.",
        "Il concerto comincia alle nove e finisce a mezzanotte.",
    ),
}


class SpeechError(Exception):
    """No speech can be made; the message says why and what to do."""


@dataclass(frozen=True)
class Sound:
    """Speech in a file of float32 samples, `RATE` a second, as `numpy.save` writes them."""

    file: Path
    language: str
    seconds: float

    def samples(self) -> np.ndarray:
        """Return the samples, float32 [n]."""
        return np.load(self.file)


def spoken_clips(folder: Path, num_clips: int) -> list[Sound]:
    """Write clips of one to three sentences, in all languages in turn. Raises SpeechError without espeak-ng."""
    turns = cycle(SENTENCES)
    pairs = islice(((next(turns), index) for index in range(num_clips)), num_clips)
    return [
        _write(folder / f"clip-{index:02}-{language}.npy", language, _take(language, index, 1 + index % 3), index)
        for language, index in pairs
    ]


def spoken_files(folder: Path, num_files: int, seconds: tuple[float, float]) -> list[Sound]:
    """Write English speech, each sound of a length between two bounds, which are reached by the first and the last."""
    lengths = np.linspace(*seconds, num_files)
    return [spoken(folder / f"file-{index:02}.npy", float(length), index) for index, length in enumerate(lengths)]


def spoken(file: Path, seconds: float, voice: int = 0) -> Sound:
    """Write English speech of a length: sentences until it is reached, and the rest is cut off."""
    parts, num_samples = list[np.ndarray](), 0
    for text in _sentences("en", voice):
        parts.append(_speak(text, "en", voice))
        num_samples += len(parts[-1])
        if num_samples >= seconds * RATE:
            break
    return _saved(file, "en", np.concatenate(parts)[: int(seconds * RATE)])


def added(folder: Path, language: str, file: str) -> Sound:
    """Write recorded speech of at most 30 s."""
    samples = decode_audio(Path(file).read_bytes(), RATE, AudioLimits(max_seconds=30.0))
    return _saved(folder / f"{Path(file).stem}.npy", language, samples)


def _write(file: Path, language: str, texts: list[str], voice: int) -> Sound:
    return _saved(file, language, np.concatenate([_speak(text, language, voice) for text in texts]))


def _saved(file: Path, language: str, samples: np.ndarray) -> Sound:
    np.save(file, samples)
    return Sound(file, language, len(samples) / RATE)


def _take(language: str, start: int, count: int) -> list[str]:
    return list(islice(_sentences(language, start), count))


def _sentences(language: str, start: int) -> Iterator[str]:
    """Yield a language's sentences again and again."""
    texts = SENTENCES[language]
    return islice(cycle(texts), start % len(texts), None)


def _speak(text: str, language: str, voice: int) -> np.ndarray:
    """Return a text as float32 samples, with a pitch and a speed of a voice's number."""
    with tempfile.TemporaryDirectory(prefix="speech-") as scratch:
        wave = Path(scratch, "speech.wav")
        style = ["-p", str(30 + 7 * (voice % 6)), "-s", str(140 + 9 * (voice % 5))]
        try:
            subprocess.run(["espeak-ng", "-v", language, *style, "-w", str(wave), text], check=True)
        except OSError as error:
            raise SpeechError(
                f"espeak-ng does not run ({error}): install it, on Debian as root by apt install."
            ) from None
        samples, rate = soundfile.read(wave, dtype="float32")
    return decode_audio((samples, rate), RATE, AudioLimits(max_seconds=None))
