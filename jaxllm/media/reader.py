"""Make a prompt's images, videos and sounds into what the core encodes, and its placeholders into their tokens."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxllm.core_messages import MediaItem, MediaSpan, PromptMedia
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.processor import AudioProcessor, make_audio_processor
from jaxllm.media.budget import ByteBudget
from jaxllm.media.cache import CacheCounts, ProcessedCache
from jaxllm.media.decode import content_hash, decode_image, image_size, uuid_hash
from jaxllm.media.embeds.checked import embeds_shape, read_embeds
from jaxllm.media.errors import MediaError, MediaFetchError
from jaxllm.media.expand import Encodes, Expanded, Expander, Span
from jaxllm.media.fetching.connector import MediaConnector
from jaxllm.media.frames import Sampling, Video, decode_video, video_size
from jaxllm.media.items import Embeds, MediaPart, MediaSettings, Modality, field_of, split_options
from jaxllm.media.positions import rope_positions
from jaxllm.media.processors import ImageProcessor, ProcessedImage
from jaxllm.media.shapes import ItemShape
from jaxllm.media.video_processor import FrameTimes, VideoProcessor
from jaxllm.params.checks import INT32_MAX

if TYPE_CHECKING:
    from PIL.Image import Image

_NUM_THREADS = 8
"""The most items that are fetched, decoded and processed at once."""
_AT_ONCE = 2
"""The most of them that are of one prompt."""
_DEFAULT_FPS = 24.0
"""The frames a second of an array that comes without metadata, as in HF."""
_FETCHED_BYTES = 2**30
"""The most bytes of the files that one prompt names."""
_DECODING_BYTES = 2**32
"""The most bytes that all items take together while they are decoded and processed."""
_BYTES_PER_PIXEL, _BYTES_PER_FRAME_PIXEL = 12, 6
"""What decoding takes: pixels in three modes, or as float32; frames as they are, and turned."""
_OF_ITEMS = ("multi_modal_data", "video")
"""The parameters of a processor's errors that concern an item; others are options."""


class _Item(NamedTuple):
    name: str
    """A hash of the item's content, or of the user's name for it, and of the options by which it is processed."""
    processed: ProcessedImage


class _How(NamedTuple):
    options: Mapping[str, Any]
    """The engine's mm_processor_kwargs with those of the request."""
    sampling: Sampling
    is_beside_others: bool
    """The prompt's images have other shapes because there are several."""

    def name(self, modality: Modality, content: str) -> str:
        """Return the name of an item, whose content `content` stands for."""
        beside = " beside others" if self.is_beside_others and modality == "image" else ""
        return _hash(content + beside, self.options)


class _Fetched(NamedTuple):
    part: MediaPart
    source: Any
    """What is to be decoded."""
    name: str | None
    """As in `_Item`; None if the content decides."""
    cached: ProcessedImage | None
    num_bytes: int
    """What it takes to decode and process the item."""

    @property
    def label(self) -> str:
        return self.part.label


class _Totals:
    """Counts the tokens of a prompt's items, and the bytes that were fetched for it. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._sum, self._num_bytes, self._lock = limit, 0, 0, threading.Lock()

    def add_fetched(self, num_bytes: int) -> None:
        """Count a fetched file, which is kept until all are there. Raises MediaError once they are too many bytes."""
        with self._lock:
            self._num_bytes += num_bytes
            if self._num_bytes > _FETCHED_BYTES:
                raise MediaError(f"the files of one prompt have more than {_FETCHED_BYTES:,} bytes together.")

    def add_tokens(self, count: int) -> None:
        """Count an item's tokens. Raises VLLMValidationError once they are more than the limit."""
        with self._lock:
            self._sum += count
            if self._sum > self._limit:
                message = (
                    f"the prompt's images, videos and sounds take {self._sum} tokens or more, and max_model_len is "
                )
                message += f"{self._limit}: send fewer or smaller ones."
                raise VLLMValidationError(message, parameter="multi_modal_data")


class MediaReader:
    """Reads the images, videos and sounds of one model's prompts, which may take seconds. Threads may share it."""

    def __init__(self, settings: MediaSettings, tokenizer: Encodes) -> None:
        """Make a reader for a model, whose settings `media_settings` has checked."""
        self._settings = settings
        self._expander = Expander(settings.config, tokenizer)
        self._connector = MediaConnector(
            allowed_local_media_path=settings.allowed_local_media_path,
            allowed_media_domains=settings.allowed_media_domains,
        )
        self._cache = ProcessedCache(int(settings.cache_gb * 2**30))
        self._budget = ByteBudget(_DECODING_BYTES)
        self._options, self._sampling = settings.options, Sampling().merged(settings.sampling)

    @cached_property
    def _image_processor(self) -> ImageProcessor:
        """Make the processor for the first image: it imports transformers."""
        return ImageProcessor(self._settings.image_processor, self._settings.config)

    @cached_property
    def _video_processor(self) -> VideoProcessor:
        return VideoProcessor(self._settings.video_processor, self._settings.config)

    @cached_property
    def _audio_processor(self) -> AudioProcessor:
        return make_audio_processor(self._settings.audio_processor, self._expander.rule.clips)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="jaxllm-media")

    @property
    def counts(self) -> CacheCounts:
        """Return how often processed items were looked up and found."""
        return self._cache.counts

    def forget_all(self) -> None:
        """Forget all processed items."""
        self._cache.clear()

    def prepare(self) -> None:
        """Load what processes images, which takes seconds; without this the first image does it."""
        if self._settings.image_placeholder is not None:
            _ = self._image_processor

    def close(self) -> None:
        """Start no more fetches. Those that run are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def read(
        self,
        prompt: str | Sequence[int],
        parts: Sequence[MediaPart],
        options: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], PromptMedia]:
        """Return a prompt's token ids, with a token for each row of its media, and the media.

        `options` are mm_processor_kwargs, and `sampling` says which frames of videos are taken, as `Sampling.merged`
        reads it. Raises MediaError for an item that cannot be fetched or read and for items that do not fit
        max_model_len, and VLLMValidationError for options that do not exist or that raise the engine's bounds and for
        placeholders that do not fit the items.
        """
        options, sampling = self._split(options or {}, sampling or {})
        wanted = self._merged(sampling)
        self._expander.check_counts(prompt, [part.modality for part in parts])
        self._check_request(parts, options)
        are_several = sum(part.modality == "image" for part in parts) > 1
        is_beside_others = are_several and self._image_processor.splits_alone
        how = _How({**self._options, **options}, wanted, is_beside_others)
        totals = _Totals(self._settings.max_model_len)
        fetched = self._map(partial(self._fetch, how=how, totals=totals), parts)
        items = self._map(partial(self._make, how=how, totals=totals), fetched)
        shapes = [item.processed.shape for item in items]
        for part, shape in zip(parts, shapes, strict=True):
            with _naming(part):
                self._check_length(shape)
        if isinstance(prompt, str):
            expanded = self._expander.expand_text(prompt, shapes, add_special_tokens=add_special_tokens)
        else:
            expanded = self._expander.expand_ids(prompt, shapes)
        return expanded.ids, self._media(items, expanded)

    def _map[Part: (MediaPart, _Fetched), Read](
        self, read: Callable[[Part], Read], parts: Sequence[Part]
    ) -> list[Read]:
        """Return what each part is read as, a few at a time: one request leaves threads to others."""
        turns = threading.BoundedSemaphore(_AT_ONCE)
        running: list[Future[Read]] = []
        try:
            for part in parts:
                turns.acquire()
                running.append(self._submit(read, part))
                running[-1].add_done_callback(lambda _: turns.release())
                for done in [future for future in running if future.done()]:
                    done.result()
            return [future.result() for future in running]
        finally:
            for future in running:
                future.cancel()

    def _submit[Part: (MediaPart, _Fetched), Read](self, read: Callable[[Part], Read], part: Part) -> Future[Read]:
        try:
            return self._threads.submit(read, part)
        except RuntimeError as error:  # the pool is closed
            message = f"{part.label}: the engine is shutting down, so that nothing is fetched any more."
            raise MediaFetchError(message, parameter=field_of(part.label)) from error

    def _split(
        self, options: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return options of the processor and sampling; a model without videos has no options about frames."""
        return (options, sampling) if self._settings.video_placeholder is None else split_options(options, sampling)

    def _merged(self, sampling: Mapping[str, Any]) -> Sampling:
        try:
            return self._sampling.merged(sampling)
        except MediaError as error:
            raise MediaError(f"media_io_kwargs: {error}", parameter="media_io_kwargs") from None

    def _check_request(self, parts: Sequence[MediaPart], request: Mapping[str, Any]) -> None:
        """Raise VLLMValidationError if a request's options raise a bound of the engine's."""
        modalities = {part.modality for part in parts} if request else set()
        if modalities == {"audio"}:
            message = (
                "mm_processor_kwargs are options of images and videos, and the prompt has neither: leave them out."
            )
            raise VLLMValidationError(message, parameter="mm_processor_kwargs", value=min(request))
        for modality in modalities - {"audio"}:
            processor = self._image_processor if modality == "image" else self._video_processor
            try:
                processor.check_request(self._options, request)
            except VLLMValidationError as error:
                raise VLLMValidationError(str(error), parameter="mm_processor_kwargs", value=error.value) from None

    def _fetch(self, part: MediaPart, how: _How, totals: _Totals) -> _Fetched:
        """Fetch an item that is not cached, and count its tokens by its header."""
        with _naming(part):
            name = None
            if part.uuid is not None:
                # The user's name of a video does not say which of its frames were taken.
                frames = f" {how.sampling}" if part.modality == "video" else ""
                name = how.name(part.modality, f"{uuid_hash(part.modality, part.uuid)}{frames}")
                if (cached := self._cache.get(name)) is not None:
                    totals.add_tokens(self._count_tokens(cached.shape))
                    return _Fetched(part, None, name, cached, 0)
                if part.source is None:
                    raise MediaError(self._missing(part))
            source: Any = part.source
            if isinstance(source, Embeds):
                item = self._read_embeds(source, part.modality, name, how.options)
                totals.add_tokens(self._count_tokens(item.processed.shape))
                return _Fetched(part, None, item.name, item.processed, 0)
            if isinstance(source, str):
                source = self._connector.fetch(source, part.modality)
                totals.add_fetched(len(source))
            num_tokens, num_bytes = self._measure(part.modality, source, how)
            totals.add_tokens(num_tokens)
            self._check_rows(part.modality, num_tokens)
            return _Fetched(part, source, name, None, num_bytes)

    def _missing(self, part: MediaPart) -> str:
        """Return the error for a name under which nothing is cached."""
        message = f"no item is cached under the uuid {part.uuid!r}: send it again."
        if part.modality == "image" and self._image_processor.splits_alone:
            message += " For this model an image alone in a prompt and the same one beside others are two items."
        return message

    def _check_rows(self, modality: Modality, num_rows: int) -> None:
        """Raise MediaError for an item that the engine has no room to encode."""
        most = self._settings.most_rows
        if num_rows > most:
            smaller = {
                "image": "a smaller one, lower the sizes in mm_processor_kwargs",
                "video": "a smaller one, take fewer frames by num_frames in media_io_kwargs, lower the sizes in "
                "mm_processor_kwargs",
                "audio": "a shorter one",
            }
            message = f"the {modality} takes {num_rows} tokens, and this engine encodes at most {most} at once: "
            raise MediaError(f"{message}send {smaller[modality]}, or raise max_num_batched_tokens.")

    def _check_length(self, shape: ItemShape) -> None:
        """Raise MediaError for a video whose positions in time, or those of tokens after it, may not be int32."""
        steps = self._settings.steps_per_second
        if self._settings.rope_merge is None or steps is None or shape.modality != "video":
            return
        seconds = shape.grids[0][0] * shape.seconds_per_step
        # Other positions count tokens: those before an item, and those after its last one.
        if seconds * steps + 2 * self._settings.max_model_len > INT32_MAX:
            message = f"the video's {seconds:,.0f} seconds take positions of 2^31 or more: send a shorter one, or "
            raise MediaError(message + "correct what its metadata say of its times.")

    def _read_embeds(self, source: Embeds, modality: Modality, name: str | None, options: Mapping[str, Any]) -> _Item:
        """Check computed embeddings, which are kept only under a user's name: without it they come again anyway."""
        embeds = read_embeds(source, modality, self._settings.row_size, self._settings.most_rows)
        rule, merge = self._expander.rule, self._settings.rope_merge
        shape = embeds_shape(embeds, modality, rule, merge, lambda size: self._image_processor.shape(size, options))
        processed = ProcessedImage(embeds.rows_rw.tobytes(), shape, is_encoded=True)
        if name is None:
            return _Item(_hash(content_hash(embeds.rows_rw), {}), processed)
        self._cache.put(name, processed)
        return _Item(name, processed)

    def _measure(self, modality: Modality, source: Any, how: _How) -> tuple[int, int]:
        """Return the tokens that an item takes, and the bytes to decode and process it, by its header.

        An item that stands on its side may take other numbers: of both, the tokens are the lower, and an image's bytes
        the higher. A sound's tokens are counted when it is decoded.
        """
        if modality == "audio":
            return 0, self._audio_processor.work_bytes
        if modality == "image":
            height, width = image_size(source)
            measured = [
                self._image_processor.measure(size, how.options, is_beside_others=how.is_beside_others)
                for size in ((height, width), (width, height))
            ]
            num_bytes = height * width * _BYTES_PER_PIXEL + max(num_bytes for _, num_bytes in measured)
            return min(self._count_tokens(shape) for shape, _ in measured), num_bytes
        number, height, width = video_size(source, how.sampling)
        times = FrameTimes(_DEFAULT_FPS, tuple(range(number)), number)
        shape = self._video_processor.shape((height, width), times, how.options)
        num_bytes = number * height * width * _BYTES_PER_FRAME_PIXEL + self._video_processor.work_bytes(shape)
        return self._count_tokens(shape), num_bytes

    def _count_tokens(self, shape: ItemShape) -> int:
        return self._expander.rule.count_rows(shape)

    def _make(self, fetched: _Fetched, how: _How, totals: _Totals) -> _Item:
        """Decode and process a fetched item, unless it is cached."""
        name = fetched.name
        if name is not None and fetched.cached is not None:
            return _Item(name, fetched.cached)
        with _naming(fetched.part), self._budget.hold(fetched.num_bytes):
            media = self._decode(fetched, how.sampling)
            if isinstance(media, np.ndarray):
                self._count_sound(len(media), totals)
            if name is None:
                name = how.name(fetched.part.modality, _content_hash(media))
                if (cached := self._cache.get(name)) is not None:
                    return _Item(name, cached)
            return self._process(media, name, how)

    def _decode(self, fetched: _Fetched, sampling: Sampling) -> Image | Video | np.ndarray:
        part, source = fetched.part, fetched.source
        if part.modality == "image":
            return decode_image(source)
        if part.modality == "audio":
            from jaxllm.media.audio.decode import decode_audio  # which loads libraries that images do not need

            processor = self._audio_processor
            # Resampling may round the number of samples up.
            return decode_audio(source, processor.rate, processor.limits)[: processor.most_samples]
        return decode_video(source if part.metadata is None else (source, part.metadata), sampling)

    def _count_sound(self, num_samples: int, totals: _Totals) -> None:
        """Count the tokens of a decoded sound. Raises MediaError if it is too short or too long."""
        num_tokens = self._count_tokens(self._audio_processor.shape(num_samples))
        if num_tokens < 1:
            raise MediaError(f"the audio has {num_samples} samples, which are too few for a token: send a longer one.")
        totals.add_tokens(num_tokens)
        self._check_rows("audio", num_tokens)

    def _process(self, media: Image | Video | np.ndarray, name: str, how: _How) -> _Item:
        if isinstance(media, np.ndarray):
            processed = self._audio_processor.process(media)
        elif isinstance(media, Video):
            fps = media.fps or _DEFAULT_FPS
            times = FrameTimes(fps, tuple(media.indices), media.num_source_frames, media.duration)
            processed = self._video_processor.process(media.frames_thwc, times, how.options)
        else:
            processed = self._image_processor.process(media, how.options, is_beside_others=how.is_beside_others)
        self._cache.put(name, processed)
        return _Item(name, processed)

    def _media(self, items: Sequence[_Item], expanded: Expanded) -> PromptMedia:
        spans_of: list[list[MediaSpan]] = [[] for _ in items]
        for span in expanded.spans:
            spans_of[span.item].append(MediaSpan(span.offset, span.num_rows, span.first_row))
        # In a prompt with images and videos, placeholders decide the order.
        order = sorted(range(len(items)), key=lambda item: spans_of[item][0].offset)
        made = [_core_item(items[item], spans_of[item]) for item in order]
        positions, offset = self._positions(items, expanded.ids, expanded.spans)
        return PromptMedia(items=made, rope_positions=positions, rope_offset=offset)

    def _positions(self, items: Sequence[_Item], ids: Sequence[int], spans: Sequence[Span]) -> tuple[bytes, int]:
        """Return the positions of multimodal RoPE, and its offset after the prompt, for a model that has it."""
        merge = self._settings.rope_merge
        if merge is None:
            return b"", 0
        shapes = [item.processed.shape for item in items]
        seconds = self._settings.steps_per_second
        numbered = rope_positions(len(ids), spans, shapes, merge_size=merge, steps_per_second=seconds)
        return numbered.positions.T.astype(np.int32).tobytes(), numbered.delta


@contextmanager
def _naming(part: MediaPart) -> Iterator[None]:
    """Let errors name the item, or mm_processor_kwargs if they concern an option."""
    try:
        yield
    except VLLMValidationError as error:
        if error.parameter not in _OF_ITEMS and not isinstance(error, MediaError):
            raise VLLMValidationError(str(error), parameter="mm_processor_kwargs", value=error.value) from None
        kind = type(error) if isinstance(error, MediaError) else MediaError
        raise kind(f"{part.label}: {error}", parameter=field_of(part.label)) from None


def _core_item(item: _Item, spans: list[MediaSpan]) -> MediaItem:
    shape = item.processed.shape
    # A user's name may stand for items of several shapes, one after the other.
    return MediaItem(
        key=hashlib.blake2b(f"{item.name} {shape}".encode(), digest_size=32).digest(),
        modality=shape.modality,
        grids=list(shape.grids),
        size=shape.size,
        patches=item.processed.data,
        spans=spans,
        is_encoded=item.processed.is_encoded,
    )


def _content_hash(media: Image | Video | np.ndarray) -> str:
    if isinstance(media, Video):
        times = f"{media.indices} {media.num_source_frames} {media.fps} {media.duration}"
        return f"{content_hash(media.frames_thwc)} {times}"
    return content_hash(media)


def _hash(content: str, options: Mapping[str, Any]) -> str:
    text = f"{content} {json.dumps(options, sort_keys=True, default=repr)}"
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
