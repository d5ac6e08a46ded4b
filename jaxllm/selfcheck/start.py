"""The check at an engine's start: which ops the device's own kernels must not run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax

from jaxllm.config.arguments import EngineArguments
from jaxllm.exceptions import VLLMValidationError
from jaxllm.selfcheck.device import Accelerators, find_accelerators
from jaxllm.selfcheck.kept import alone, keep_report, portable_args, read_report, report_path
from jaxllm.selfcheck.process import examine
from jaxllm.selfcheck.report import Report, Verdict

logger = logging.getLogger(__name__)


def disproved_ops(args: EngineArguments) -> Mapping[str, str]:
    """Return why ops must run in plain XLA here, by the op's name. A check may take minutes.

    Nothing is checked on a CPU, on several hosts, without `args.selfcheck`, and where the result of an earlier check is
    kept; nor are ops that are proven on the device. Call it before JAX opens the devices. Raises RuntimeError if a
    kernel has left the device so that no other process can open it.
    """
    accelerators = find_accelerators() if args.selfcheck and not _is_for_cpu() else None
    if accelerators is None:
        return {}
    try:
        engine_args = portable_args(args)
    except VLLMValidationError as error:  # a mesh, whose devices are open
        _warn(args, accelerators, str(error))
        return {}
    path = report_path(engine_args, accelerators)
    with alone(path):
        report = read_report(path)
        if report is not None and report.complete:
            _warn_of_untried(report)
            return report.disproved()
        obstacle = _obstacle(args)
        if obstacle is not None:
            _warn(args, accelerators, obstacle)
            return {}
        faults = [] if report is None else [verdict for verdict in report.verdicts if verdict.is_fault]
        try:
            report = _examine(engine_args, accelerators, faults)
        except VLLMValidationError as error:  # the engine's own start may accept what the child refuses
            _warn(args, accelerators, str(error))
            return {}
        if report.platform == "cpu":  # the GPU may be there at another start
            return {}
        keep_report(path, report)
    _tell(report)
    return report.disproved()


def _examine(engine_args: dict[str, Any], accelerators: Accelerators, faults: list[Verdict]) -> Report:
    logger.info(
        "not all kernels have run on %s in their present form: they are compared with the reference now, once "
        "(selfcheck=False, --no-selfcheck: not at all)",
        accelerators.name,
    )
    return examine(
        engine_args,
        driver=accelerators.driver,
        without=faults,
        proven=accelerators.proven_ops,
        checks_cpu=False,
    )


def _tell(report: Report) -> None:
    wrong = report.disproved()
    if report.problem and wrong:
        raise RuntimeError(f"{report.problem}. The next start leaves out {', '.join(wrong)}.")
    if report.problem:
        logger.warning("the kernels could not be checked: %s", report.problem)
    elif not _warn_of_untried(report) and report.verdicts and not wrong:
        logger.info("%d runs of kernels on this %s agree with the reference", len(report.verdicts), report.device)


def _warn_of_untried(report: Report) -> bool:
    """Warn of kernels that there was too little memory to check; return whether there are some."""
    untried = [verdict for verdict in report.verdicts if verdict.status == "unknown"]
    if untried:
        logger.warning(
            "%d runs of kernels could not be checked, and `jaxllm selfcheck` tries them again: %s",
            len(untried),
            untried[0].reason,
        )
    return bool(untried)


def _warn(args: EngineArguments, accelerators: Accelerators, obstacle: str) -> None:
    logger.warning(
        "not all kernels have run on %s in their present form, and they are not checked now: %s. `jaxllm selfcheck`%s "
        "checks them.",
        accelerators.name,
        obstacle.rstrip("."),
        " on each host" if args.nnodes != 1 else "",
    )


def _is_for_cpu() -> bool:
    return str(jax.config.jax_platforms or "").partition(",")[0] == "cpu"


def _obstacle(args: EngineArguments) -> str | None:
    """Return why another process must not open the devices now, or None if it may."""
    from jax._src import xla_bridge

    if args.nnodes != 1:  # their patience has a limit
        return "the other hosts would wait for this one"
    if xla_bridge.backends_are_initialized():
        return "this process has opened the devices already"
    return None
