"""The last thing that is done to a pooling model's outputs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.execution.pooled_step import Activation

ROWS = np.array([[3.0, 5.0]], np.float32)
CALIBRATED = [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "activates", "wanted"),
    [
        ("sigmoid", True, 1 / (1 + np.exp(np.negative(CALIBRATED)))),
        ("softmax", True, np.exp(CALIBRATED) / np.exp(CALIBRATED).sum()),
        ("none", True, CALIBRATED),
        ("sigmoid", False, CALIBRATED),
    ],
)
def test_scores_are_calibrated_whether_or_not_they_are_activated(
    name: str, activates: bool, wanted: list[float]
) -> None:
    activated = Activation(name, mean=1.0, sigma=2.0)(ROWS, activates=activates)
    np.testing.assert_allclose(activated, [wanted], rtol=1e-6)
