"""Write tests/data/whisper: tiny random Whisper models, with what HF Transformers makes of clips.

Needs an environment with torch and transformers (`scripts/peers.sh DIR hf`):

    DIR/hf/bin/python scripts/make.py whisper_goldens [CASE ...]

A case is one file: config.json and the tensors' names in a saved checkpoint with their shapes, and for each clip the
decoder's prompt, greedy tokens and log-probabilities of all rows, in float32 with eager attention. Weights and clips
are drawn from a seed, by `tests.models.random_weights` and `tests.models.clips`, so that the tests draw the same.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.models.clips import NUM_FRAMES, RATE, draw_clip
from tests.models.random_weights import draw_weights

MAX_SEEDS = 400
MIN_GAP = 2e-3
"""The least distance of a greedy token's log-probability from the next one's."""
MIN_INFLUENCE = 5e-2
"""How far a log-probability of the prompt must move when the clip runs backwards."""
NUM_TOKENS = 12
LENGTHS = (4, 1, 21)
"""The prompts' lengths: each goes with a clip of its own."""
SECONDS = (0.61, 1.0, 0.33)
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": NUM_FRAMES,
    "max_target_positions": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "begin_suppress_tokens": None,
}
CASES: dict[str, dict[str, Any]] = {
    "base": {"num_mel_bins": 80, "encoder_layers": 2, "decoder_layers": 2},
    "large_v3": {
        "num_mel_bins": 128,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "d_model": 48,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 80,
    },
    "turbo": {"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1, "vocab_size": 112},
}


def prompt_of(vocab_size: int, index: int) -> list[int]:
    """Return a decoder's prompt, which begins with the start token."""
    rng = np.random.default_rng([7, index])
    return [2, *rng.integers(3, vocab_size, LENGTHS[index] - 1).tolist()]


@torch.inference_mode()
def run(model: Any, features: torch.Tensor, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens, and the log-probabilities of all rows."""
    encoded, ids = model.model.encoder(features), list(prompt)
    while True:
        logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        if len(ids) == len(prompt) + NUM_TOKENS - 1:
            break
        ids.append(int(logits[-1].argmax()))
    logprobs = torch.log_softmax(logits.double(), dim=-1).float().numpy()
    return [*ids[len(prompt) :], int(logprobs[-1].argmax())], logprobs


def attempt(name: str, seed: int) -> dict[str, np.ndarray] | None:
    """Return the arrays of a case, or None if a greedy token is in doubt."""
    config = transformers.WhisperConfig(**{**TINY, **CASES[name]})
    config.architectures = ["WhisperForConditionalGeneration"]
    extractor = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1)
    with tempfile.TemporaryDirectory() as folder:
        transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {key: list(tensor.shape) for key, tensor in load_file(file).items()}
        save_file(draw_weights(shapes, seed, "whisper"), file, {"format": "pt"})
        model = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        saved = json.loads((Path(folder) / "config.json").read_text())
    arrays: dict[str, np.ndarray] = {}
    for index, seconds in enumerate(SECONDS):
        clip = draw_clip(seconds, index)
        features = extractor(clip, sampling_rate=RATE, return_tensors="pt").input_features
        prompt = prompt_of(config.vocab_size, index)
        tokens, logprobs = run(model, features, prompt)
        greedy = np.sort(logprobs[len(prompt) - 1 :], axis=-1)
        if (greedy[:, -1] - greedy[:, -2]).min() < MIN_GAP or len(set(tokens)) < 2 or 1 in tokens:
            return None
        arrays |= {f"prompt_{index}": np.array(prompt), f"tokens_{index}": np.array(tokens)}
        arrays[f"logprobs_{index}"] = logprobs
        with torch.inference_mode():
            arrays[f"encoded_{index}"] = model.model.encoder(features).last_hidden_state[0].numpy()[::7]
        _, other = run(model, features.flip(-1), prompt)
        if np.abs(other - logprobs)[: len(prompt)].max() < MIN_INFLUENCE:
            return None
    case = {"config": saved, "seed": seed, "seconds": SECONDS, "shapes": dict(sorted(shapes.items()))}
    return {"case": np.array(json.dumps(case)), **arrays}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    folder = Path(__file__).parents[2] / "tests/data/whisper"
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.cases or CASES:
        for seed in range(MAX_SEEDS):
            if (arrays := attempt(name, seed)) is not None:
                break
        else:
            raise SystemExit(f"{name}: no seed leaves all tokens certain")
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(f"{name}: seed {seed}, tokens {[arrays[f'tokens_{i}'].tolist() for i in range(len(SECONDS))]}")


if __name__ == "__main__":
    main()
