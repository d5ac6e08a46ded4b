"""Ultravox in torch, which HF does not have: HF's Whisper encoder and Llama, and a projector between them."""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.whisper.modeling_whisper import WhisperEncoder

_COLUMN = 160
"""The samples of a sound for each column of its features."""
_RMS_EPS = 1e-6


class _Projector(nn.Module):
    """Stacked frames become a row: RMSNorm, matmul, SwiGLU, RMSNorm, matmul, as from Ultravox 0.5 on."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.group: int = config["stack_factor"]
        stacked, inner = self.group * config["audio_config"]["d_model"], config["hidden_size"]
        self.ln_pre = nn.RMSNorm(stacked, _RMS_EPS)
        self.linear_1 = nn.Linear(stacked, inner, bias=False)
        self.ln_mid = nn.RMSNorm(inner // 2, _RMS_EPS)
        self.linear_2 = nn.Linear(inner // 2, config["text_config"]["hidden_size"], bias=False)

    def forward(self, frames_fd: Tensor) -> Tensor:
        """Return the rows of a clip's frames, with zeros after them."""
        frames_fd = functional.pad(frames_fd, (0, 0, 0, -len(frames_fd) % self.group))
        value, gate = self.linear_1(self.ln_pre(frames_fd.reshape(-1, self.group * frames_fd.shape[1]))).chunk(2, -1)
        return self.linear_2(self.ln_mid(functional.silu(gate) * value))


class Ultravox(nn.Module):
    """A model as HF's are, as far as goldens need it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        audio, text = (
            kind(**(config[part] | {"attn_implementation": "eager"}))
            for kind, part in ((transformers.WhisperConfig, "audio_config"), (transformers.LlamaConfig, "text_config"))
        )
        self.audio_tower = WhisperEncoder(audio)
        self.multi_modal_projector = _Projector(config)
        self.language_model = transformers.LlamaForCausalLM(text)

    @property
    def generation_config(self) -> Any:
        """Return the text model's settings of generation."""
        return self.language_model.generation_config

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self.language_model.dtype

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json and the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")
        save_file(self.state_dict(), folder / "model.safetensors", {"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: Path, *, dtype: torch.dtype, **others: Any) -> Self:
        """Read what `save_pretrained` wrote."""
        del others
        model = cls(json.loads((folder / "config.json").read_text()))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(dtype)

    def rows(self, clips: Tensor, lengths: Tensor) -> Tensor:
        """Return the rows of clips, each of as many columns as `lengths` says and encoded without what follows."""
        rows = []
        for clip_mt, length in zip(clips, lengths.tolist(), strict=True):
            tower = self.audio_tower
            x_1df = functional.gelu(tower.conv1(clip_mt[None, :, :length].to(self.dtype)))
            x_1fd = functional.gelu(tower.conv2(x_1df)).transpose(1, 2)
            x_1fd = x_1fd + tower.embed_positions.weight[: x_1fd.shape[1]]
            for layer in tower.layers:
                out = layer(x_1fd, None)
                x_1fd = out[0] if isinstance(out, tuple) else out
            rows.append(self.multi_modal_projector(tower.layer_norm(x_1fd)[0]))
        return torch.cat(rows)

    def _embed(self, input_ids: Tensor, clips: Tensor | None, lengths: Tensor | None) -> Tensor:
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if clips is not None and lengths is not None:
            embeds[input_ids == self.config["audio_token_index"]] = self.rows(clips, lengths)
        return embeds

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        input_features: Tensor | None = None,
        lengths: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return what the text model does."""
        embeds = self._embed(input_ids, input_features, lengths)
        return self.language_model(inputs_embeds=embeds, attention_mask=attention_mask, **others)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        input_features: Tensor | None = None,
        lengths: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return what the text model does; the prompt is not among the tokens."""
        embeds = self._embed(input_ids, input_features, lengths)
        return self.language_model.generate(inputs_embeds=embeds, attention_mask=attention_mask, **others)


def hear(extractor: Any, sounds: Sequence[np.ndarray], group: int) -> tuple[list[int], dict[str, Tensor]]:
    """Return the number of rows of each sound, and the columns of all clips. Loudness is that of a whole sound."""
    longest = extractor.nb_max_frames
    rows, clips, lengths = [], [], []
    for sound in sounds:
        settings = {"padding": "longest", "pad_to_multiple_of": _COLUMN, "truncation": False}
        features = extractor(sound, sampling_rate=16_000, return_tensors="pt", **settings)["input_features"][0]
        parts = torch.split(features, longest, dim=1)
        clips += [functional.pad(part, (0, longest - part.shape[1])) for part in parts]
        lengths += [part.shape[1] for part in parts]
        rows.append(sum(-(-part.shape[1] // (2 * group)) for part in parts))
    return rows, {"input_features": torch.stack(clips), "lengths": torch.tensor(lengths)}
