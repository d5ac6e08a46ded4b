"""Compare Whisper with Hugging Face's, on the same weights in float32: tokens, log-probabilities, words' times.

    scripts/check.py speech --hf-python DIR/hf/bin/python      # writes benchmarks/results/speech.json

`scripts/peers.sh DIR hf` makes the environment. espeak-ng speaks the clips, in five languages; `--sounds en:FILE ...`
adds others. Greedy tokens must be equal, with and without timestamps, and log-probabilities within 1e-4; the clips of a
sound of five minutes must give HF's tokens one by one. Clips at once, alone, and preempted must give the same bits. The
words of the clips must be HF's, and their times within 20 ms. HF runs on one thread, since its threads wait for one
another when other programs run: it takes about 20 minutes. `--hf-answers FILE` keeps what it says, and a later run with
the same clips reads it from the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fetch_models import MODELS, FetchError, default_dir, fetch
from lib.results import describe_server, make_parser, result_file, save
from lib.speech import RATE, Sound, SpeechError, added, spoken, spoken_clips
from peers.worker import BenchmarkError, Worker

from jaxllm import LLM, SamplingParams
from jaxllm.media.audio.clips import split_clips
from jaxllm.speech.segments import Word
from jaxllm.speech.tokens import SpeechTokens
from jaxllm.speech.words import find_words, time_tokens

NUM_CLIPS, LONG_SECONDS = 30, 300.0
MOST_DIFFERENCE = 1e-4
"""How far a log-probability may be from HF's."""
MOST_SECONDS = 0.02
"""How far the time of a word may be from HF's."""
KINDS = ("text", "timestamps")
BLOCK_SIZE = 16
ENGINE: Mapping[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "block_size": BLOCK_SIZE}
TIGHT_TOKENS = 64
"""The tokens of the longest clip, and about the room of a key-value cache in which clips preempt one another."""


def main() -> int:
    """Compare; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--hf-python", required=True, metavar="PATH", help="Python of scripts/peers.sh DIR hf")
    parser.add_argument("--model", type=Path, help="a Whisper's folder (default: base, fetched)")
    parser.add_argument("--sounds", nargs="*", default=[], metavar="LANGUAGE:FILE", help="recorded speech")
    parser.add_argument("--hf-answers", type=Path, metavar="FILE", help="JSON file that keeps what HF says")
    parser.add_argument("--quick", action="store_true", help="few clips; saves nothing")
    args = parser.parse_args()
    try:
        model = args.model or fetch(MODELS["whisper"], default_dir())
        with tempfile.TemporaryDirectory(prefix="check-speech-") as scratch:
            report = _compare(args, model, Path(scratch))
    except (BenchmarkError, FetchError, OSError, SpeechError) as error:
        print(f"check speech: {error}", file=sys.stderr)
        return 1
    for name, value in report.items():
        print(f"{name:36}{value}")
    save(result_file(args, "speech.json"), describe_server() | {"model": model.name} | report)
    return 0 if report["passed"] else 1


def _compare(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    clips = spoken_clips(folder, 4 if args.quick else NUM_CLIPS)
    clips += [added(folder, *sound.split(":", 1)) for sound in args.sounds]
    long = spoken(folder / "long.npy", 70.0 if args.quick else LONG_SECONDS)
    parts = [_part(folder, index, part) for index, part in enumerate(split_clips(long.samples(), RATE))]
    answers = _answers(args, model, clips, parts, folder / "hf")
    expected, of_parts, words = answers["clips"], answers["parts"], answers["words"]
    report: dict[str, Any] = {
        "clips": len(clips),
        "languages": sorted({clip.language for clip in clips}),
        "seconds": round(sum(clip.seconds for clip in clips)),
        "long_clips": len(parts),
        "versions": answers["versions"],
    }
    llm = LLM(str(model), **ENGINE)
    outputs = {}
    for kind in KINDS:
        outputs[kind] = _run(llm, clips, expected[kind])
        report |= {f"{kind}: {name}": value for name, value in _differences(outputs[kind], expected[kind]).items()}
        of_long = _differences(_run(llm, parts, of_parts[kind]), of_parts[kind])
        report |= {f"{kind}, long: {name}": value for name, value in of_long.items()}
    report |= _words(llm, clips, expected["timestamps"], words)
    kind = KINDS[0]
    alone = [_run(llm, [clip], [one])[0] for clip, one in zip(clips, expected[kind], strict=True)]
    report["alone: equal bits"] = sum(a == b for a, b in zip(alone, outputs[kind], strict=True))
    del llm
    tight = LLM(
        str(model), **ENGINE, max_model_len=TIGHT_TOKENS, num_gpu_blocks_override=TIGHT_TOKENS // BLOCK_SIZE + 2
    )
    preempted = _run(tight, clips, expected[kind])
    report["preempted: equal bits"] = sum(a == b for a, b in zip(preempted, outputs[kind], strict=True))
    report["preemptions"] = sum(
        getattr(metric, "value", 0) for metric in tight.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    report["passed"] = _passed(report)
    return report


def _answers(
    args: argparse.Namespace, model: Path, clips: Sequence[Sound], parts: Sequence[Sound], folder: Path
) -> dict[str, Any]:
    """Return what HF says: tokens by kind of the clips and of the parts, the clips' words, and its versions."""
    digest = hashlib.sha256(b"".join(sound.file.read_bytes() for sound in (*clips, *parts))).hexdigest()
    if args.hf_answers and args.hf_answers.exists():
        answers = json.loads(args.hf_answers.read_text())
        if answers["digest"] == digest:
            return answers
    settings = {"model": str(model), "dtype": "float32", "attention": "eager", "threads": 1}
    with Worker("speech_hf", args.hf_python, settings, folder) as hf:
        answers = {
            "digest": digest,
            "clips": {kind: _tokens(hf, clips, kind) for kind in KINDS},
            "parts": {kind: _tokens(hf, parts, kind) for kind in KINDS},
            "words": hf.call("words", [str(clip.file) for clip in clips], [clip.language for clip in clips]).value,
            "versions": hf.call("versions").value,
        }
    if args.hf_answers:
        args.hf_answers.write_text(json.dumps(answers))
    return answers


def _part(folder: Path, index: int, samples: np.ndarray) -> Sound:
    file = folder / f"part-{index}.npy"
    np.save(file, samples)
    return Sound(file, "en", len(samples) / RATE)


def _tokens(hf: Worker, sounds: Sequence[Sound], kind: str) -> list[Any]:
    """Return the decoder's prompt, tokens and log-probabilities of each sound by HF."""
    arguments = [str(sound.file) for sound in sounds], [sound.language for sound in sounds], kind
    return hf.call("tokens", *arguments).value


def _run(llm: LLM, sounds: Sequence[Sound], expected: Sequence[Any]) -> list[tuple[list[int], list[float]]]:
    """Return greedy tokens and their log-probabilities of sounds, all at once, after HF's prompts."""
    prompts: list[Any] = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (sound.samples(), RATE)}}
        for sound, (prompt, *_) in zip(sounds, expected, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=440, logprobs=0)
    done = llm.generate(prompts, params, use_tqdm=False)
    answers = []
    for output in done:
        [completion] = output.outputs
        assert completion.logprobs is not None
        steps = zip(completion.token_ids, completion.logprobs, strict=True)
        pairs = [(token, step[token].logprob) for token, step in steps if token != llm.get_tokenizer().eos_token_id]
        answers.append(([token for token, _ in pairs], [logprob for _, logprob in pairs]))
    return answers


def _differences(outputs: Sequence[tuple[list[int], list[float]]], expected: Sequence[Any]) -> Mapping[str, Any]:
    """Return how many sounds have HF's tokens, of how many, and the largest difference of log-probabilities there."""
    equal = [index for index, (tokens, _) in enumerate(outputs) if tokens == expected[index][1]]
    gaps = [np.abs(np.subtract(outputs[index][1], expected[index][2])).max(initial=0.0) for index in equal]
    return {"equal": len(equal), "of": len(outputs), "difference": float(max(gaps, default=0.0))}


def _words(
    llm: LLM, clips: Sequence[Sound], expected: Sequence[Any], of_hf: Sequence[Sequence[Any]]
) -> Mapping[str, Any]:
    """Return how many clips have HF's words, of how many words, and how far their times are from HF's."""
    tokens = SpeechTokens.of(llm.llm_engine.front.require_tokenizer(), llm.llm_engine.front.ready.vocab_size)
    num_equal, num_words, gap, others = 0, 0, 0.0, []
    for clip, (prompt, ids, _), theirs in zip(clips, expected, of_hf, strict=True):
        audio: Any = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (clip.samples(), RATE)}}
        timed = time_tokens(ids, llm.llm_engine.align(audio, ids))
        text = [token for token in timed if token.token_id < tokens.end]
        ours = _joined(find_words(text, tokens.text, clip.language), [word for word, *_ in theirs])
        if [word for word, *_ in ours] != [word.strip() for word, *_ in theirs]:
            others.append({"file": clip.file.name, "ours": ours, "theirs": theirs})
        else:
            num_equal += 1
            num_words += len(ours)
            pairs = [(ours[i][1] - theirs[i][1], ours[i][2] - theirs[i][2]) for i in range(len(ours))]
            gap = max(gap, float(np.abs(np.array(pairs)).max(initial=0.0)))
    return {
        "words: equal": num_equal,
        "words: number": num_words,
        "words: seconds apart": round(gap, 4),
        "words: others": others,
    }


def _joined(words: Sequence[Word], theirs: Sequence[str]) -> list[tuple[str, float, float]]:
    """Return words with their starts and ends, those joined that are one word to HF.

    Its pipeline does not tell its tokenizer the language, and so divides Chinese at spaces alone.
    """
    joined, left = [], list(words)
    for text in theirs:
        taken = [left.pop(0)] if left else []
        while left and taken and len("".join(word.word for word in taken).strip()) < len(text.strip()):
            taken.append(left.pop(0))
        if taken:
            joined.append(("".join(word.word for word in taken).strip(), taken[0].start, taken[-1].end))
    return joined + [(word.word.strip(), word.start, word.end) for word in left]


def _passed(report: Mapping[str, Any]) -> bool:
    kinds = [f"{kind}{part}" for kind in KINDS for part in ("", ", long")]
    tokens = all(report[f"{name}: equal"] == report[f"{name}: of"] for name in kinds)
    close = all(report[f"{name}: difference"] <= MOST_DIFFERENCE for name in kinds)
    bits = report["alone: equal bits"] == report["preempted: equal bits"] == report["clips"]
    words = report["words: equal"] == report["clips"] and report["words: seconds apart"] <= MOST_SECONDS + 1e-6
    return tokens and close and bits and words and report["preemptions"] > 0


if __name__ == "__main__":
    sys.exit(main())
