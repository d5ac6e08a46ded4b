"""Write tests/data/steering: vectors for tiny checkpoints, and what HF Transformers computes with hooks that add them.

Needs the environment of tiny_checkpoints, whose checkpoints it reads: `python scripts/make.py steering_goldens`.
Same versions, same bytes.

Each case is a folder with vectors.safetensors, as `LLM(steering=...)` takes it, and golden.npz: the prompt, the hidden
states that all layers put out for it without steering, `hidden_ntd` [layers, t, d], and for each of STEERED the greedy
tokens with a vector and their log-probabilities, all in float32 with eager attention.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

CASES = ("llama3_tied", "gemma3", "qwen3_next", "qwen3_moe", "phi", "falcon_h1")
"""Models of plain layers, several norms, recurrent state, experts, parallel parts, and state beside attention."""
STEERED: Mapping[str, tuple[str, float]] = {"all": ("all", 0.75), "one": ("one", -2.0)}
"""A vector and its scale by the golden's name: one of all layers, and one of the second layer."""
NUM_TOKENS = 8
MIN_GAP = 5e-3
"""Rounding could change a greedy choice as close as this; such a seed is not taken."""


def main() -> None:
    """Write all cases."""
    data = Path(__file__).parents[2] / "tests" / "data"
    for case in CASES:
        folder = data / "steering" / case
        folder.mkdir(parents=True, exist_ok=True)
        with np.load(data / "tiny" / case / "golden.npz") as arrays:
            ids = arrays["prompt_1"].astype(np.int32)
        vectors, arrays = make(str(data / "tiny" / case), ids)
        named = {f"{name}.layers.{layer}": row for name, rows in vectors.items() for layer, row in rows.items()}
        save_file(named, folder / "vectors.safetensors")
        (folder / "vectors.safetensors").chmod(0o644)
        np.savez_compressed(folder / "golden.npz", **arrays)


@torch.no_grad()
def make(path: str, ids: np.ndarray) -> tuple[dict[str, dict[int, np.ndarray]], dict[str, Any]]:
    """Return the vectors of one case by name and layer, and its golden arrays."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layers = model.base_model.layers
    hidden_ntd = read_layers(model, layers, torch.tensor(ids.astype(np.int64))[None])
    for seed in range(100):
        drawn_ld = torch.randn((len(layers), model.config.hidden_size), generator=torch.Generator().manual_seed(seed))
        rows_ld = (drawn_ld * hidden_ntd.std((1, 2))[:, None]).numpy()
        vectors = {"all": dict(enumerate(rows_ld)), "one": {1: rows_ld[1][::-1].copy()}}
        arrays: dict[str, Any] = {"prompt": ids, "hidden_ntd": hidden_ntd.numpy()}
        gaps = []
        for golden, (name, scale) in STEERED.items():
            with ExitStack() as hooks:
                for layer, row in vectors[name].items():
                    hook = layers[layer].register_forward_hook(adding(torch.from_numpy(row) * scale))
                    hooks.callback(hook.remove)
                tokens, logprobs = decode(model, ids)
            best = np.sort(logprobs, axis=-1)[:, -2:]
            gaps.append((best[:, 1] - best[:, 0]).min())
            arrays |= {f"tokens_{golden}": np.array(tokens, np.int32), f"logprobs_{golden}": logprobs}
        if min(gaps) > MIN_GAP:
            return vectors, arrays
    raise RuntimeError(f"{path}: no seed gives tokens that rounding cannot change")


def adding(row: torch.Tensor) -> Any:
    """Return a hook that adds a vector to a layer's output."""

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0] + row, *output[1:]) if isinstance(output, tuple) else output + row

    return hook


def read_layers(model: Any, layers: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the outputs of all layers, [layers, t, d]; HF gives all but the last one before its norm too."""
    outputs: list[torch.Tensor] = []

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [layer.register_forward_hook(hook) for layer in layers]
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for layer_hook in hooks:
        layer_hook.remove()
    for ours, theirs in zip(outputs[:-1], states[1:], strict=False):
        assert torch.equal(ours, theirs[0]), "a hook sees other hidden states than HF returns"
    return torch.stack(outputs)


def decode(model: Any, ids: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens, and the log-probabilities that they were taken from; the whole text is computed anew."""
    tokens: list[int] = []
    rows = []
    for _ in range(NUM_TOKENS):
        text = torch.tensor([[*ids.tolist(), *tokens]])
        row = model(input_ids=text, use_cache=False).logits[0, -1].log_softmax(-1)
        rows.append(row.numpy())
        tokens.append(int(row.argmax()))
    return tokens, np.stack(rows).astype(np.float32)


if __name__ == "__main__":
    main()
