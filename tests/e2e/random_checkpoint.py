"""Write checkpoints with random weights that are large enough to tell right results from wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxllm.models import ModelSpecs, get_family


def save_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint with random weights so large that one token is clearly the most likely."""
    rng = np.random.default_rng(0)
    specs = ModelSpecs(get_family(config["architectures"][0]).read_config(config), "float32").param_specs()
    tensors = {}
    for path, spec in specs.items():
        for source in spec.sources:
            fan_in = 4 if "embed" in path or "lm_head" in path else spec.hf_shape[-1]
            noise = rng.standard_normal(spec.hf_shape, np.float32) / fan_in**0.5
            tensors[source] = 1 + 0.1 * noise if "norm" in path else noise
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
