"""Pictures and videos for a server's soak: a model that sees, requests with items, and items that are refused."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
from lib.machine import ROOT
from PIL import Image

from check.soaking.requests import CHAT, Ask, Lengths, chat_options, some_words
from tests.e2e.pictures import draw

SIDES = (56, 84, 112, 168, 224, 280, 336, 500)
"""Widths and heights of pictures in pixels; larger ones than 336 x 336 are made smaller by the model's processor."""
NUM_PICTURES, NUM_VIDEOS = 24, 4
MOST_ITEMS = 3
FORMATS = ("PNG", "JPEG", "WEBP")
VIDEO_SIDE, VIDEO_FRAMES = 84, 6
_BASE = ROOT / "tests" / "data" / "media" / "qwen2_vl"
WIDTH, TOWER_WIDTH = 256, 64
NUM_LAYERS, HEAD_DIM, PATCH_SIZE = 6, 64, 14
_MROPE = [8, 12, 12]
_PIXELS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 336 * 336}
_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_model(folder: Path, width: int = WIDTH, tower_width: int = TOWER_WIDTH) -> Path:
    """Write a model without weights into a folder, for `--load-format dummy`; returns the folder.

    It is a Qwen2-VL with a byte-level tokenizer, and with hidden states of `width` numbers, a multiple of 64, and of
    `tower_width` in the tower, a multiple of 4 for each of the width / 64 heads.
    """
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "processor_config.json"):
        shutil.copy(_BASE / name, folder)
    config = json.loads((_BASE / "config.json").read_text())
    text, tower, num_heads = config["text_config"], config["vision_config"], width // HEAD_DIM
    text |= {"hidden_size": width, "intermediate_size": 4 * width, "max_position_embeddings": 2048}
    text |= {"num_hidden_layers": NUM_LAYERS, "layer_types": ["full_attention"] * NUM_LAYERS}
    text |= {"num_attention_heads": num_heads, "num_key_value_heads": num_heads // 2}
    text["rope_parameters"]["mrope_section"] = _MROPE
    tower |= {"hidden_size": width, "embed_dim": tower_width, "depth": NUM_LAYERS, "num_heads": num_heads}
    tower |= {"mlp_ratio": 4, "patch_size": PATCH_SIZE}
    processor = json.loads((_BASE / "preprocessor_config.json").read_text())
    processor |= {"patch_size": PATCH_SIZE, "size": _PIXELS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def make_picture_asks(source: random.Random, num: int, lengths: Lengths, *, drawing: int = 0) -> list[Ask]:
    """Return random chats with one to MOST_ITEMS pictures, or a video, between their texts.

    With the same source and another number of a `drawing` the chats are the same, about other items of the same sizes.
    """
    pictures = [_picture_part(source, drawing * NUM_PICTURES + index) for index in range(NUM_PICTURES)]
    videos = [_part("video", "mp4", _video(drawing * NUM_VIDEOS + index)) for index in range(NUM_VIDEOS)]
    return [_make_ask(source, lengths, pictures, videos) for _ in range(num)]


def _make_ask(source: random.Random, lengths: Lengths, pictures: list[Any], videos: list[Any]) -> Ask:
    is_video = source.random() < 0.15
    items = [source.choice(videos)] if is_video else source.choices(pictures, k=source.choice((1, 1, 2, MOST_ITEMS)))
    parts: list[Any] = []
    for item in items:
        parts += [_text(source, 6), item]
    parts.append(_text(source, lengths.words))
    messages: list[Any] = [{"role": "user", "content": parts}]
    if source.random() < 0.3:
        messages += [{"role": "assistant", "content": some_words(source, 3)}]
        messages += [{"role": "user", "content": [source.choice(pictures), _text(source, 3)]}]
    return Ask(CHAT, {"messages": messages} | chat_options(source, lengths), may_stream=True, has_media=True)


def _text(source: random.Random, most: int) -> dict[str, Any]:
    return {"type": "text", "text": some_words(source, source.randint(1, most))}


def _picture_part(source: random.Random, seed: int) -> dict[str, Any]:
    file_format = source.choice(FORMATS)
    return _part("image", file_format.lower(), _picture(source.choice(SIDES), source.choice(SIDES), seed, file_format))


def _part(modality: str, subtype: str, data: bytes) -> dict[str, Any]:
    url = f"data:{modality}/{subtype};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def _picture(width: int, height: int, seed: int, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(draw(width, height, seed)).save(file, file_format)
    return file.getvalue()


def picture_url(width: int, height: int, seed: int) -> str:
    """Return a picture as a data: URL."""
    return _part("image", "jpeg", _picture(width, height, seed, "JPEG"))["image_url"]["url"]


def _video(seed: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = VIDEO_SIDE
        stream.pix_fmt = "yuv420p"
        for index in range(VIDEO_FRAMES):
            frame_hwc = np.roll(draw(VIDEO_SIDE, VIDEO_SIDE, seed), 9 * index, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_hwc, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _png(width: int, height: int) -> bytes:
    """Return a PNG whose header has this size, and that has almost no data."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")))
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chat(*parts: Any, **more: Any) -> tuple[str, Any, int]:
    return CHAT, {"messages": [{"role": "user", "content": list(parts)}]} | more, 400


def _url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


_GOOD = _part("image", "png", _picture(56, 56, 0))
BAD_PICTURES: tuple[tuple[str, Any, int], ...] = (
    _chat(_part("image", "png", _picture(224, 224, 1)[:900])),
    _chat(_part("image", "jpeg", _picture(224, 224, 1, "JPEG")[:700])),
    _chat(_part("image", "png", b"GIF89a")),
    _chat(_part("image", "png", b"")),
    _chat(_part("image", "png", _png(60_000, 60_000))),
    _chat(_part("image", "png", _png(2_000_000_000, 1))),
    _chat(_part("image", "png", _picture(1, 1, 0)), _part("image", "png", _picture(8000, 2, 0))),
    _chat(_part("image", "svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>")),
    _chat(_part("video", "mp4", _video(0)[:400])),
    _chat(_part("video", "mp4", b"\x00\x00\x00\x18ftypmp42" + bytes(500))),
    _chat(_url("data:image/png;base64,@@@@")),
    _chat(_url("data:image/png,plain")),
    _chat(_url("file:///etc/passwd")),
    _chat(_url("http://127.0.0.1:8000/health")),
    _chat(_url("http://169.254.169.254/latest/meta-data/")),
    _chat(_url("http://[::1]/")),
    _chat(_url("http://user@example.com\\@127.0.0.1/")),
    _chat(_url("ftp://example.com/a.png")),
    _chat({"type": "image_url", "uuid": "nobody has sent this"}),
    _chat(*[_GOOD] * (MOST_ITEMS + 2)),
    _chat(_GOOD, {"type": "text", "text": "and <|image_pad|>"}),
    _chat(_GOOD, mm_processor_kwargs={"max_pixels": 1 << 40}),
    _chat(_GOOD, mm_processor_kwargs={"do_resize": False}),
    _chat(_part("video", "mp4", _video(0)), media_io_kwargs={"video": {"num_frames": -1}}),
    _chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
)
"""Requests with items that are damaged, too large, out of bounds or no items at all, each with its refusal."""
