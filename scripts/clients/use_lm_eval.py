"""lm-eval against a server: log-likelihoods of endings, and a task of generated text. Prints the former as JSON.

Its tokenizer is the server's, and the task's documents are here: nothing is fetched.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

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


def main(url: str, key: str) -> None:
    """Print what lm-eval has got of each ending."""
    os.environ["OPENAI_API_KEY"] = key
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        data = folder / "endings.jsonl"
        data.write_text("".join(json.dumps({"text": text, "choices": each}) + "\n" for text, each in ENDINGS))
        (folder / "endings.yaml").write_text(CHOICES.format(data=data))
        (folder / "texts.yaml").write_text(TEXTS.format(data=data))
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "smollm2",
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "remote",
                "auth_token": key,
                "num_concurrent": 4,
                "max_retries": 1,
            },
            tasks=["endings", "texts"],
            task_manager=TaskManager(include_path=name),
            log_samples=True,
            bootstrap_iters=0,
        )
    assert results is not None
    assert all(each["resps"][0][0] for each in results["samples"]["texts"])
    rows = []
    for sample in results["samples"]["endings"]:
        document = sample["doc"]
        for ending, [(logprob, is_greedy)] in zip(document["choices"], sample["resps"], strict=True):
            row = {"context": document["text"], "ending": ending}
            rows.append(row | {"logprob": float(logprob), "is_greedy": str(is_greedy) == "True"})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
