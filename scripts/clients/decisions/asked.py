"""The state and the options that all clients of decisions ask about."""

from __future__ import annotations

import math
from collections.abc import Iterable

STATE = "My card was charged twice for one order, and nobody has answered my letters."
TEAM = "Which team should handle this ticket?"
TEAMS = {"billing": "payments and refunds", "shipping": None, "account access": "locked accounts"}
URGENT = "Does the customer need a reply within the hour?"
TONE = "How upset is the customer?"
TONES = ["calm", "annoyed", "furious"]


def check(probabilities: Iterable[float]) -> None:
    """Fail unless numbers are the probabilities of all options."""
    values = list(probabilities)
    assert all(0 < each < 1 for each in values), values
    assert math.isclose(sum(values), 1, rel_tol=1e-6), values
