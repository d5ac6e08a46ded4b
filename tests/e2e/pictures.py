"""Small pictures drawn with integers alone: the same bytes wherever they are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np


def draw(width: int, height: int, seed: int) -> np.ndarray:
    """Return a picture [height, width, 3], uint8: a gradient, and over it a rectangle, a disc and a stripe."""
    x_hw, y_hw = np.meshgrid(np.arange(width), np.arange(height))
    picture_hwc = np.empty((height, width, 3), np.uint8)
    for channel in range(3):
        slope_x, slope_y = (seed * 7 + channel * 5) % 11 + 1, (seed * 3 + channel * 13) % 7 + 1
        picture_hwc[..., channel] = (x_hw * slope_x + y_hw * slope_y + 40 * channel + 17 * seed) % 256
    colours = [[(seed * 53 + shape * 91 + channel * 67) % 256 for channel in range(3)] for shape in range(3)]
    left, top = width * (1 + seed % 3) // 6, height * (1 + seed % 2) // 5
    picture_hwc[top : top + height // 3, left : left + width // 4] = colours[0]
    x, y, radius = width * 2 // 3, height * (2 + seed % 2) // 4, min(width, height) // 5
    picture_hwc[(x_hw - x) ** 2 + (y_hw - y) ** 2 <= radius**2] = colours[1]
    picture_hwc[(x_hw + y_hw * (1 + seed % 3)) % 29 < 3] = colours[2]
    return picture_hwc


def draw_clip(num_frames: int, width: int, height: int) -> list[np.ndarray]:
    """Return the frames of a video, [height, width, 3] each."""
    return [draw(width, height, 10 + number) for number in range(num_frames)]


def clip_metadata(num_frames: int) -> dict[str, Any]:
    """Return what is known of the video: every thirtieth frame is taken, one a minute."""
    indices = list(range(0, 30 * num_frames, 30))
    return {"total_num_frames": 30 * num_frames, "fps": 0.5, "duration": 60.0 * num_frames, "frames_indices": indices}


def change_middle(picture_hwc: np.ndarray, size: int = 8) -> np.ndarray:
    """Return the picture with the colours of a square in the middle inverted."""
    height, width, _ = picture_hwc.shape
    rows, columns = (slice((side - size) // 2, (side + size) // 2) for side in (height, width))
    changed_hwc = picture_hwc.copy()
    changed_hwc[rows, columns] = 255 - changed_hwc[rows, columns]
    return changed_hwc
