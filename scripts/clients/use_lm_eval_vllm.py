"""Run lm-eval with its vllm backend, where jaxllm.as_vllm puts jaxllm: use_lm_eval_vllm.py MODEL.

It scores endings and generates texts, with an engine in this process. Prints the log-likelihoods as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from endings import TASKS, rows_of, write_tasks


def main(model: str) -> None:
    """Print lm-eval's log-likelihood of each ending."""
    with tempfile.TemporaryDirectory() as name:
        write_tasks(Path(name))
        import lm_eval
        from lm_eval.tasks import TaskManager

        results = lm_eval.simple_evaluate(
            model="vllm",
            model_args={"pretrained": model, "max_model_len": 256},
            batch_size="auto",
            tasks=TASKS,
            task_manager=TaskManager(include_path=name),
            log_samples=True,
            bootstrap_iters=0,
        )
    assert results is not None
    assert len(results["samples"]["texts"]) == len(results["samples"]["endings"])
    assert all(isinstance(each["resps"][0][0], str) for each in results["samples"]["texts"])
    print(json.dumps(rows_of(results)))


if __name__ == "__main__":
    main(sys.argv[1])
