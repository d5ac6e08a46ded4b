"""Write tests/data/gguf/vision: tiny checkpoints of tests/data/media as GGUF, by llama.cpp's own converter.

Needs llama.cpp's sources, such as those in the source distribution of llama-cpp-python, and an environment with torch,
transformers and gguf, as `scripts/peers.sh DIR hf` makes it:

    DIR/hf/bin/python scripts/make.py gguf_vision LLAMA_CPP

Each family gets a folder with the text model, and the vision tower in a file of its own. Both are in bfloat16, as the
checkpoints are; Q8_0.gguf has a tower whose matrices are quantized where their rows allow it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
FAMILIES = ("gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
QUANTIZED = "qwen2_5_vl"
SPLITTING = "qwen2"
"""The name of how the tiny tokenizers split text: the converter knows only the tokenizers of real models."""
WINDOW_KEY = "clip.vision.window_size"


def patch_converter(vision: Any, text: Any) -> None:
    """Let the converter take tiny models: their tokenizers, and a window that real models never change."""
    text.get_vocab_base_pre = lambda _self, _tokenizer: SPLITTING
    write = vision.set_gguf_parameters

    def write_all(self: Any) -> None:
        write(self)
        if "window_size" in self.hparams_vision:
            self.gguf_writer.add_uint32(WINDOW_KEY, self.hparams_vision["window_size"])

    vision.set_gguf_parameters = write_all


def stage(family: str, folder: Path) -> None:
    """Copy a checkpoint, with names of tensors as on the hub: later versions of HF drop a module of Gemma's tower."""
    source = DATA / "media" / family
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    tensors = load_file(source / "model.safetensors")
    if family == "gemma3":
        tower = "vision_tower."
        tensors = {name.replace(tower, f"{tower}vision_model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def convert(main: Any, folder: Path, target: Path, kind: str, *options: str) -> None:
    """Run the converter."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sys.argv = ["convert", str(folder), "--outfile", str(target), "--outtype", kind, *options]
    main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="the folder of llama.cpp's sources")
    sources = parser.parse_args().sources.resolve()
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel
    from conversion.qwenvl import Qwen2VLVisionModel

    patch_converter(Qwen2VLVisionModel, TextModel)
    for family in FAMILIES:
        target = DATA / "gguf" / "vision" / family
        with tempfile.TemporaryDirectory() as staged:
            folder = Path(staged) / family
            folder.mkdir()
            stage(family, folder)
            convert(convert_hf_to_gguf.main, folder, target / f"{family}.gguf", "bf16")
            convert(convert_hf_to_gguf.main, folder, target / f"mmproj-{family}.gguf", "bf16", "--mmproj")
            if family == QUANTIZED:
                quantized = DATA / "gguf" / "vision" / "Q8_0.gguf"
                convert(convert_hf_to_gguf.main, folder, quantized, "q8_0", "--mmproj")


if __name__ == "__main__":
    main()
