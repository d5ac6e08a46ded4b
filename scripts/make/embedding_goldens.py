"""Write tests/data/goldens/all-minilm-l6-v2.npz: texts, and sentence-transformers' embeddings in float32.

    pip install torch transformers==5.23.0 sentence-transformers==6.2.0
    python scripts/make.py embedding_goldens FOLDER      # of all-MiniLM-L6-v2, see scripts/fetch_models.py minilm

There are 200 texts of 1 to 512 tokens, made of random words of the model's vocabulary, and then a small corpus with
questions about it. Each text is encoded alone.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "goldens" / "all-minilm-l6-v2.npz"
NUM_TEXTS = 200
MOST_TOKENS = 512
CORPUS = (
    "The harbour froze over in the winter of 1709, and grain ships waited for the thaw.",
    "Whales sing in long phrases that carry for hundreds of kilometres under water.",
    "A hash table keeps each key in a bucket that its hash value selects.",
    "Bread dough rises because yeast turns sugar into carbon dioxide.",
    "The referee stopped the match when fog covered the pitch.",
    "Photosynthesis stores the energy of sunlight in sugar.",
    "The violin has four strings, tuned in fifths.",
    "Interest rates were raised to slow inflation down.",
    "A binary search halves the range that may hold the key at each step.",
    "The glacier has lost a third of its length since measurements began.",
    "Her grandmother's recipe asks for cardamom and orange peel.",
    "The train to the coast leaves from platform nine every hour.",
    "Antibiotics do not help against viruses.",
    "The comet returns every seventy-six years.",
    "A contract needs an offer and an acceptance.",
    "Bees tell each other the way to flowers by dancing.",
)
QUESTIONS = (
    "How do insects show each other where food is?",
    "Which data structure finds a value by hashing?",
    "Why did the central bank act?",
    "What makes bread rise?",
    "How is a string instrument tuned?",
    "What did the cold do to shipping?",
)


def make_texts(model: SentenceTransformer) -> list[str]:
    """Return texts of random words, with lengths spread evenly up to the model's limit."""
    tokenizer = model.tokenizer
    words = sorted(token for token in tokenizer.get_vocab() if token.isascii() and token.isalpha() and len(token) > 1)
    rng = random.Random(23)
    texts = []
    for number in range(NUM_TEXTS):
        # [CLS] and [SEP] are two tokens; the shortest text has a word.
        count = max(1, round((MOST_TOKENS - 2) * number / (NUM_TEXTS - 1)))
        texts.append(" ".join(rng.choices(words, k=count)))
    return texts


def main() -> None:
    """Encode the texts, one after the other, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    model = SentenceTransformer(str(parser.parse_args().folder), device="cpu", model_kwargs={"dtype": torch.float32})
    model.max_seq_length = MOST_TOKENS
    texts = [*make_texts(model), *CORPUS, *QUESTIONS]
    lengths = [len(model.tokenizer(text)["input_ids"]) for text in texts]
    embeddings = np.stack([model.encode(text) for text in texts]).astype(np.float32)
    np.savez_compressed(
        FILE,
        texts=np.frombuffer(json.dumps(texts).encode(), np.uint8),
        lengths=np.array(lengths, np.int32),
        embeddings=embeddings,
        num_questions=np.int32(len(QUESTIONS)),
        num_texts=np.int32(NUM_TEXTS),
    )
    print(f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
