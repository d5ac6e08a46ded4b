"""What the op must know about a layer."""

from __future__ import annotations

from typing import Any, NamedTuple


class ConvShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Its dtype is numpy's, so that equal shapes are one."""

    num_channels: int
    kernel_size: int
    """How many tokens each output depends on, its own the last."""
    dtype: Any
    """The dtype of x, weights, states and the output."""
