"""Write tests/data/alignment: where HF Transformers hears the tokens of clips.

Needs an environment with torch and transformers (`scripts/peers.sh DIR hf`), and for `speech` Whisper base
(`scripts/fetch_models.py whisper`) and espeak-ng:

    DIR/hf/bin/python scripts/make.py alignment_goldens tiny
    DIR/hf/bin/python scripts/make.py alignment_goldens speech FOLDER

`tiny.npz` has the tiny models of tests/data/whisper. `speech.npz` has sentences that espeak-ng speaks, as 8,000 bytes a
second, with Whisper base's tokens and HF's times. HF's own functions make the times, of the weights of one pass over
prompt and tokens, in float32.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers.models.whisper.generation_whisper import _median_filter
from transformers.utils import ModelOutput

from tests.models.clips import RATE, draw_clip, unpack_speech
from tests.models.random_weights import draw_weights

HEADS = {"base": [[1, 0], [1, 1]], "large_v3": [[0, 1], [2, 0], [2, 2], [1, 1]], "turbo": None}
"""The alignment heads; None for all of the later layers."""
SPEECH = {
    "en": "Hello there, this is a small test of word times. It costs four dollars, isn't that nice?",
    "de": "Guten Tag, dies ist ein kleiner Versuch. Die Größe der Häuser ist sehr verschieden.",
}
FOLDER = Path(__file__).parents[2] / "tests" / "data"


@torch.inference_mode()
def align(model: Any, clip: np.ndarray, prompt: list[int], tokens: list[int], heads: Any) -> dict[str, np.ndarray]:
    """Return the mean of the heads' weights [tokens, frames with sound], and the tokens' times."""
    seconds = model.config.max_source_positions // 50
    extractor = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins, chunk_length=seconds)
    inputs = extractor(clip, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    num_columns = int(inputs.attention_mask.sum())
    ids = torch.tensor([[*prompt, *tokens]])
    output = model(inputs.input_features, decoder_input_ids=ids, output_attentions=True, use_cache=False)
    if heads is None:
        num_layers, num_heads = model.config.decoder_layers, model.config.decoder_attention_heads
        heads = [[layer, head] for layer in range(num_layers // 2, num_layers) for head in range(num_heads)]
    steps = ModelOutput(cross_attentions=(output.cross_attentions,), sequences=ids)
    extract = model._extract_token_timestamps
    times = extract(steps, heads, num_frames=np.array([num_columns]), num_input_ids=len(prompt))[0]
    weights = torch.stack([output.cross_attentions[layer][0, head] for layer, head in heads])
    weights = weights[:, len(prompt) :, : num_columns // 2]
    apart = (weights - weights.mean(1, keepdim=True)) / weights.std(1, keepdim=True, unbiased=False)
    heard = _median_filter(apart[None], 7)[0].mean(0)
    return {"heard": heard.numpy(), "times": times[len(prompt) : -1].numpy()}


def make_tiny() -> dict[str, np.ndarray]:
    """Return the arrays of all tiny models."""
    arrays: dict[str, np.ndarray] = {"heads": np.array(json.dumps(HEADS))}
    for name, heads in HEADS.items():
        goldens = np.load(FOLDER / "whisper" / f"{name}.npz")
        case = json.loads(str(goldens["case"]))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(case["config"]))
            tensors = draw_weights(case["shapes"], case["seed"], "whisper")
            save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
            model = load(folder)
        for i, seconds in enumerate(case["seconds"]):
            prompt, tokens = goldens[f"prompt_{i}"].tolist(), goldens[f"tokens_{i}"].tolist()
            aligned = align(model, draw_clip(seconds, i), prompt, tokens, heads)
            arrays |= {f"{name}_{kind}_{i}": array for kind, array in aligned.items()}
    return arrays


def make_speech(folder: str) -> dict[str, np.ndarray]:
    """Return the arrays of spoken sentences: sound, prompts, tokens and times."""
    model, arrays = load(folder), {}
    processor = transformers.WhisperProcessor.from_pretrained(folder)
    for language, text in SPEECH.items():
        command = ["espeak-ng", "-v", language, "-s", "150", "--stdout", text]
        spoken = subprocess.run(command, check=True, capture_output=True).stdout
        resample = ["sox", "-t", "wav", "-", "-t", "raw", "-e", "mu-law", "-b", "8", "-r", str(RATE // 2), "-"]
        sound = np.frombuffer(subprocess.run(resample, input=spoken, check=True, capture_output=True).stdout, np.uint8)
        clip = unpack_speech(sound)
        features = processor(clip, sampling_rate=RATE, return_tensors="pt").input_features
        prompt = [50258, model.generation_config.lang_to_id[f"<|{language}|>"], 50359]
        ids = model.generate(features, language=language, task="transcribe", return_timestamps=True)[0].tolist()
        tokens = [each for each in ids if each < 50257 or each > 50363]
        arrays[f"sound_{language}"], arrays[f"prompt_{language}"] = sound, np.array(prompt)
        aligned = align(model, clip, prompt, tokens, model.generation_config.alignment_heads)
        arrays |= {f"tokens_{language}": np.array(tokens), f"times_{language}": aligned["times"]}
        print(language, processor.decode(tokens))
    return arrays


def load(folder: str) -> Any:
    """Return HF's model."""
    model = transformers.WhisperForConditionalGeneration
    return model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("tiny", "speech"))
    parser.add_argument("folder", nargs="?", help="of Whisper base, for speech")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    arrays = make_tiny() if args.kind == "tiny" else make_speech(args.folder)
    target = FOLDER / "alignment"
    target.mkdir(exist_ok=True)
    np.savez_compressed(target / f"{args.kind}.npz", **arrays)


if __name__ == "__main__":
    main()
