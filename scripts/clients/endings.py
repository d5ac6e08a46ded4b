"""Local tasks for lm-eval with their documents, and a reader of its results; nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENDINGS = [
    ("The capital of France is", [" Paris", " Berlin", " a fish"]),
    ("Two plus two is", [" four", " five", " blue"]),
    ("Water freezes at zero degrees", [" Celsius", " music", " tomorrow morning"]),
    ("The opposite of hot is", [" cold", " warm", " seven"]),
    ("She opened the door and", [" walked in", " purple", " the of and"]),
]
CHOICES = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
TASKS = ["endings", "texts"]


def write_tasks(folder: Path) -> None:
    """Write the tasks for lm-eval into a folder; call this before lm-eval is imported."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    data = folder / "endings.jsonl"
    data.write_text("".join(json.dumps({"text": text, "choices": each}) + "\n" for text, each in ENDINGS))
    (folder / "endings.yaml").write_text(CHOICES.format(data=data))
    (folder / "texts.yaml").write_text(TEXTS.format(data=data))


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the log-likelihood of each ending, as loglikelihoods.py reads them."""
    rows = []
    for sample in results["samples"]["endings"]:
        document = sample["doc"]
        for ending, [(logprob, is_greedy)] in zip(document["choices"], sample["resps"], strict=True):
            row = {"context": document["text"], "ending": ending}
            rows.append(row | {"logprob": float(logprob), "is_greedy": str(is_greedy) == "True"})
    return rows
