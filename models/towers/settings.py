"""The settings of a tower besides its layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

JOINS = ("concat", "channels", "mean")
COLUMN_SAMPLES = 160
"""The samples of a sound, 16,000 a second, that a column of a spectrogram stands for."""
POSITIONS = ("exact", "nearest", "bilinear", "bicubic", "axial", "line")


class NormSettings(NamedTuple):
    """A norm: by mean and variance with a bias ("layer"), or by the root mean square ("rms")."""

    kind: str
    eps: float
    offset: float = 0.0
    """The number that is added to the scales."""


class DenseSettings(NamedTuple):
    """A matmul, the activation after it, and a norm after that."""

    size: int
    """The number of outputs."""
    bias: bool = True
    act: str | None = None
    gated: bool = False
    """The activation of the second half of the outputs multiplies the first half."""
    norm: NormSettings | None = None

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs after the activation."""
        return self.size // 2 if self.gated else self.size


@dataclass(frozen=True, kw_only=True)
class Projector:
    """How the hidden states of the patches of a row become the row: norm, join, norm, matmuls."""

    dense: tuple[DenseSettings, ...]
    """The matmuls, in order; the last one gives the row."""
    norm: NormSettings | None = None
    """The norm of each patch."""
    join: str = "concat"
    """Patches are joined one after the other ("concat"), in such a way that a channel's numbers of all patches are
    consecutive ("channels"), or to their mean ("mean")."""
    standardizes: bool = False
    """What is joined is shifted and scaled by learned numbers."""
    joined_norm: NormSettings | None = None
    """The norm of what is joined."""

    def __post_init__(self) -> None:
        """Raise ValueError for a way of joining that does not exist."""
        if self.join not in JOINS:
            raise ValueError(f"join is {self.join!r}, which is not supported, only {', '.join(JOINS)}")

    @property
    def output_size(self) -> int:
        """Return the width of a row."""
        return self.dense[-1].num_outputs


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """An image is shown whole and, larger, in square tiles. A learned row follows each line of the tiles' rows."""

    tile: int
    """The side of a tile in pixels."""
    resolutions: tuple[tuple[int, int], ...]
    """The (height, width) in pixels of what an image may be enlarged to: multiples of a tile's side."""
    most: int | None = None
    """The number of tiles whose rows are the most that lines keep: they are shrunk to these where they have more by a
    fifth. None if they never are."""
    splits_alone: bool = False
    """Only an image that is the one of its prompt is split. Of several each is one tile, and so is a frame of a video;
    a learned row follows each such image and each video."""

    def __post_init__(self) -> None:
        """Raise ValueError for resolutions that are not made of tiles."""
        if not self.resolutions or any(side < 1 or side % self.tile for pair in self.resolutions for side in pair):
            raise ValueError(f"image_grid_pinpoints has other sizes than multiples of image_size, {self.tile}")

    @property
    def most_tiles(self) -> int:
        """Return the most tiles of an image, the whole image included."""
        return 1 + max(height * width for height, width in self.resolutions) // self.tile**2

    def layout(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the lines and columns of tiles of an image of a (height, width) in pixels.

        Of the resolutions that keep most of its pixels, it is the smallest.
        """

        def fit(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / size[1], resolution[0] / size[0])
            kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
            return kept, kept - prod(resolution)

        height, width = max(self.resolutions, key=fit)
        return height // self.tile, width // self.tile


class Chunks(NamedTuple):
    """How a spectrogram is cut for three convolutions in two directions: eight columns become a frame."""

    num_columns: int
    """The columns of a chunk. Its last frame may have fewer than eight."""
    num_channels: int
    """The channels that each convolution gives."""

    @property
    def num_frames(self) -> int:
        """Return the frames of a chunk."""
        return -(-self.num_columns // 8)


@dataclass(frozen=True, kw_only=True)
class SoundSettings:
    """How a tower hears. Its patches are frames: each is some columns of a spectrogram, one after the other.

    A sound is cut into clips, which are encoded apart; silence fills up the last one.
    """

    num_frames: int
    """The frames of a clip."""
    group: int
    """The number of consecutive frames that become one row."""
    columns: int = 2
    """The columns of a frame."""
    hears_whole: bool = False
    """A column is heard if its 320 samples, and the next one, are of the sound; else if it begins within the sound."""
    hears_silence: bool = False
    """The frames attend to the silence after the sound too."""
    gives_silence: bool = False
    """The frames of that silence give rows too."""
    ends_in_zeros: bool = False
    """No silence follows the sound: convolutions see zeros, and zeros fill up the frames of its last row."""
    chunks: Chunks | None = None
    """The chunks of a clip, in a tower with frames of eight columns. A sound's last samples may give no column."""
    window: int | None = None
    """The frames of a clip's equal parts that do not attend to each other; None if all frames do."""

    @property
    def clip_samples(self) -> int:
        """Return the number of samples of a whole clip."""
        if self.chunks is None:
            return self.columns * COLUMN_SAMPLES * self.num_frames
        return self.num_frames // self.chunks.num_frames * self.chunks.num_columns * COLUMN_SAMPLES

    def count_columns(self, num_samples: int) -> int:
        """Return the number of columns that are heard, in a tower without chunks."""
        return (num_samples - 1) // COLUMN_SAMPLES if self.hears_whole else -(-num_samples // COLUMN_SAMPLES)

    def count_heard(self, num_samples: int) -> int:
        """Return the number of frames of a clip that the sound reaches."""
        if self.chunks is None:
            return min(self.num_frames, -(-self.count_columns(num_samples) // self.columns))
        whole, rest = divmod(num_samples // COLUMN_SAMPLES, self.chunks.num_columns)
        return min(self.num_frames, whole * self.chunks.num_frames - (-rest // 8))

    def count_rows(self, num_samples: int) -> int:
        """Return the number of rows of a clip."""
        num_frames = self.num_frames if self.gives_silence else self.count_heard(num_samples)
        return -(-num_frames // self.group) if self.ends_in_zeros else num_frames // self.group


class ConformerSettings(NamedTuple):
    """What differs between conformers, besides their layers."""

    channels: tuple[int, int]
    """The channels of the two convolutions over columns and bands."""
    kernel_size: int
    """The frames that the convolutions in layers take."""
    mlp_scale: float
    """The factor on the outputs of MLPs."""
    bound: float
    """What hidden states are clipped to before norms, on both sides of zero."""


@dataclass(frozen=True, kw_only=True)
class TowerSettings:
    """The settings of a tower besides its layers; patches form a grid of frames, rows and columns."""

    patch_shape: tuple[int, ...]
    """The shape of a patch in the order in which it is flattened, that of the convolution's weight: channels, frames
    (left out in towers for single frames), rows and columns of pixels. One number if the weight is a matrix."""
    projector: Projector
    patch_bias: bool = False
    """The embedding of patches adds a bias."""
    merge: int = 1
    """The side of the squares of patches that become one row."""
    is_blocked: bool = False
    """The image processor gives the patches of a square one after the other, instead of row by row."""
    class_position: int | None = None
    """The learned position, the first or the last, of one more token that comes after the patches of each frame and
    gives no row; None if there is none."""
    patch_norm: NormSettings | None = None
    """The norm of embedded patches, before positions are added."""
    start_norm: NormSettings | None = None
    """The norm of the stream that goes into the first layer."""
    positions: str | None = None
    """Learned positions form a square. A patch takes that of its place in a grid of the same size ("exact"), the
    nearest one ("nearest"), or a mean of the 4 or 16 around it ("bilinear", "bicubic"). In "axial" ones columns and
    rows have learned positions, and a patch takes their sum. Those of the frames of a sound form a line ("line"). None
    if no positions are learned."""
    side: int = 0
    """The number of learned positions on a side of their square, or those of columns and of rows."""
    rope_alternates: bool = False
    """The frequencies of RoPE alternate between the two axes of the grid, instead of being the same for both."""
    layer_norm: str = "layer"
    """The kind of the norms in layers, as in `NormSettings`, in families that have both."""
    window: int | None = None
    """The side of a window of the layers with an `attention_chunk`, in patches; None if all layers are global."""
    clips: bool = False
    """The matmuls of the layers clip their inputs and outputs to bounds in the checkpoint."""
    tiling: Tiling | None = None
    """The tiles of an image, whose rows are lines; None if rows are those of grids, one after the other."""
    sound: SoundSettings | None = None
    """How the tower hears; None for one that sees."""
    conformer: ConformerSettings | None = None
    """The settings of a conformer; None for other towers."""
    deepstack: tuple[int, ...] = ()
    """The numbers of the layers after which the hidden states give further outputs, ascending."""
    deep_projector: Projector | None = None
    """The projector of each of these outputs."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that do not fit together."""
        if self.positions not in (None, *POSITIONS):
            raise ValueError(f"positions is {self.positions!r}, which is not supported, only {', '.join(POSITIONS)}")
        if self.window is not None and self.window % self.merge:
            raise ValueError(f"a window of {self.window} patches does not hold whole squares of {self.merge}")
        if self.class_position not in (None, 0, self.side**2):
            raise ValueError(f"class_position is {self.class_position}, neither the first nor the last")

    @property
    def patch_dim(self) -> int:
        """Return the size of a flattened patch."""
        return prod(self.patch_shape)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Return the rows and columns of pixels of a patch."""
        return self.patch_shape[-2], self.patch_shape[-1]

    @property
    def has_class_token(self) -> bool:
        """Return whether each frame has one more token than patches."""
        return self.class_position is not None

    @property
    def num_positions(self) -> int:
        """Return the number of learned positions, that of the class token included."""
        if self.sound is not None:
            return self.sound.num_frames
        return 2 * self.side if self.positions == "axial" else self.side**2 + self.has_class_token

    @property
    def group(self) -> int:
        """Return the number of patches that become one row."""
        return self.merge**2 if self.sound is None else self.sound.group

    @property
    def output_size(self) -> int:
        """Return the width of a row with all its outputs."""
        return self.projector.output_size * (1 + len(self.deepstack))


class ClipSettings(NamedTuple):
    """The settings of an encoder of sound besides its layers."""

    num_mels: int
    """The bands of a spectrogram."""
    num_frames: int
    """The frames that it makes of a clip. The spectrogram has two columns for each."""


class Grid(NamedTuple):
    """The numbers of frames (pairs of frames if a patch has two), of rows and of columns of patches."""

    t: int
    h: int
    w: int
