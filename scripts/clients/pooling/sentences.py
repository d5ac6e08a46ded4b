"""Sentences for clients of embeddings: a query and documents, one of them the right answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

MODEL = "minilm"
QUERY = "How many people live in Berlin?"
DOCUMENTS = [
    "New York City is famous for the Metropolitan Museum of Art.",
    "Berlin had 3,520,031 registered inhabitants: that many people live in the city.",
    "The dog is chasing a ball across the garden.",
    "A recipe for bread needs flour, water, salt and yeast.",
]
BEST = 1


def cosine(one: Sequence[float], two: Sequence[float]) -> float:
    return math.sumprod(one, two) / math.hypot(*one) / math.hypot(*two)


def check_vectors(query: Sequence[float], documents: Sequence[Sequence[float]]) -> None:
    """Check that embeddings have length 1 each, and find the right document."""
    assert math.isclose(math.hypot(*query), 1, rel_tol=1e-3), math.hypot(*query)
    scores = [cosine(query, each) for each in documents]
    assert len(scores) == len(DOCUMENTS), scores
    assert max(scores) == scores[BEST], scores
    assert scores[BEST] > 0.5, scores
