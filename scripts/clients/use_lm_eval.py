"""Run lm-eval against a server: log-likelihoods of endings, printed as JSON, and a task of generated text.

Its tokenizer is the server's, and the task's documents are local: nothing is fetched.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from endings import TASKS, rows_of, write_tasks


def main(url: str, key: str) -> None:
    """Print lm-eval's log-likelihood of each ending."""
    os.environ["OPENAI_API_KEY"] = key
    with tempfile.TemporaryDirectory() as name:
        write_tasks(Path(name))
        import lm_eval
        from lm_eval.tasks import TaskManager

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
            tasks=TASKS,
            task_manager=TaskManager(include_path=name),
            log_samples=True,
            bootstrap_iters=0,
        )
    assert results is not None
    assert all(each["resps"][0][0] for each in results["samples"]["texts"])
    print(json.dumps(rows_of(results)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
