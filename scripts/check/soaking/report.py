"""The record of a server's soak, and whether it reaches the goals."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from check.soaking.census import MIB, Census, Trend, trend
from check.soaking.front_ends import Killer
from check.soaking.server_soak import NUM_DRAINED, ServerSoak

MB_PER_HOUR = 1.0
"""Memory may grow by less than this after warm-up."""
MOST_GROWTH = 1.05
"""The most memory at rest in the second half of a run, by that in the first: what a run of minutes can show."""
SHORT_SECONDS = 600.0
"""A shorter run has too little warm-up: its memory is not judged."""


def report(soak: ServerSoak, seconds: float) -> dict[str, Any]:
    """Return the record of a run; `seconds` is the time of load."""
    names = list(soak.watch.pids)
    trends = {name: trend(soak.rests(name)) for name in names}
    return {
        "outcomes": dict(sorted(soak.outcomes.items())),
        "requests": sum(soak.outcomes.values()),
        "requests_with_media": soak.num_with_media,
        "answers_that_follow_the_media": [soak.num_moved, soak.num_others],
        "items_renamed_and_processed": [soak.num_renamed, soak.num_processed],
        "preemptions": soak.num_preemptions,
        "programs_compiled": [soak.num_compiled[0], soak.num_compiled[-1]],
        **(_kills(soak, soak.killer) if soak.killer is not None else {}),
        "processes": {name: _process(soak.rests(name), soak.loaded.held[name], trends[name]) for name in names},
        "not_free_at_rest": soak.left[:20],
        "end": soak.end,
        "violations": [each[:2000] for each in soak.violations[:20]],
        "num_violations": len(soak.violations),
        "goals_reached": _verdicts(soak, trends, seconds),
    }


def _kills(soak: ServerSoak, killer: Killer) -> dict[str, Any]:
    return {
        "front_ends_killed": killer.num_kills,
        "connections_of_the_killed": killer.num_connections,
        "requests_cut": killer.num_cut,
        "not_as_one_server": soak.unshared[:20],
    }


def _process(rests: list[Census], loaded: list[Census], slope: Trend) -> dict[str, Any]:
    figures: dict[str, Any] = {"first": asdict(rests[0]), "last": asdict(rests[-1]), "rests": len(rests)}
    figures |= {f"{name}_at_rest": sorted({getattr(each, name) for each in rests}) for name in ("fds", "threads")}
    figures |= {"greatest_resident_mib": max((each.resident_mib for each in loaded), default=0.0)}
    error = None if slope.error is None else round(_per_hour(slope.error), 2)
    return figures | {"mb_per_hour": round(_per_hour(slope.slope), 2), "standard_error": error}


def _verdicts(soak: ServerSoak, trends: dict[str, Trend], seconds: float) -> dict[str, bool | None]:
    steady = {
        f"{name} of the {process} constant at rest": len({getattr(each, name) for each in soak.rests(process)}) == 1
        for process in trends
        for name in ("fds", "threads")
    }
    memory = {
        f"memory of the {process} grows by less than {MB_PER_HOUR:g} MB an hour": (
            _is_flat(each) if seconds >= SHORT_SECONDS else None
        )
        for process, each in trends.items()
    }
    memory |= {
        f"memory of the {process} in the second half at most {MOST_GROWTH:g} times that in the first": (
            _keeps_level(soak.rests(process))
        )
        for process in trends
    }
    end = {"exit_status": 0, "streams_drained": NUM_DRAINED, "streams": NUM_DRAINED, "processes_left": 0}
    return {
        "no errors, and every answer as it was alone": not soak.violations,
        "nothing runs or waits at rest, and all KV blocks and encoded items are free": not soak.left,
        "requests were preempted": soak.num_preemptions > 0,
        "no program compiled after warm-up": len(set(soak.num_compiled)) == 1 if soak.compiles_ahead else None,
        **(_media_verdicts(soak) if soak.num_others else {}),
        **(_kill_verdicts(soak, soak.killer) if soak.killer is not None else {}),
        **steady,
        **memory,
        "SIGTERM drains the streams, exits with 0, and leaves no process": soak.end == end,
    }


def _media_verdicts(soak: ServerSoak) -> dict[str, bool | None]:
    """Return whether pictures matter. The server does not count what it encodes; it encodes what it processes."""
    return {
        "most answers change when nothing but the pixels does": 2 * soak.num_moved > soak.num_others,
        "as many items were processed as were renamed": soak.num_processed >= soak.num_renamed > 0,
    }


def _kill_verdicts(soak: ServerSoak, killer: Killer) -> dict[str, bool | None]:
    """Return whether the front ends are one server. What a kill may not cost is among the errors."""
    return {
        "front ends were killed under load": 0 < killer.num_cut <= killer.num_connections,
        "bounds and counts are those of all front ends": not soak.unshared,
    }


def _is_flat(memory: Trend) -> bool | None:
    """Return whether a slope is less than allowed; None if twice its standard error spans the limit."""
    if memory.error is None:
        return None
    low, high = _per_hour(memory.slope - 2 * memory.error), _per_hour(memory.slope + 2 * memory.error)
    return True if high < MB_PER_HOUR else False if low > MB_PER_HOUR else None


def _keeps_level(rests: list[Census]) -> bool | None:
    """Return whether the most memory at rest has hardly grown from the first half of a run to the second."""
    if len(rests) < 4:
        return None
    first, second = rests[: len(rests) // 2], rests[len(rests) // 2 :]
    return max(each.resident_mib for each in second) <= MOST_GROWTH * max(each.resident_mib for each in first)


def _per_hour(mib_per_minute: float) -> float:
    return mib_per_minute * 60 * MIB / 1e6


def show(record: dict[str, Any]) -> None:
    """Print a record as a table."""
    media = f", {record['requests_with_media']} with media" if record["requests_with_media"] else ""
    print(f"{record['requests']} requests{media}, {record['preemptions']} preemptions in {record['seconds']:g} s")
    if record["requests_with_media"]:
        moved, others = record["answers_that_follow_the_media"]
        renamed, processed = record["items_renamed_and_processed"]
        print(f"{moved} of {others} answers change with the pixels; {renamed} items renamed, {processed} processed")
    if "front_ends_killed" in record:
        cut, of = record["requests_cut"], record["connections_of_the_killed"]
        print(f"{record['front_ends_killed']} front ends killed, with {of} connections: {cut} requests cut")
    for outcome, num in record["outcomes"].items():
        print(f"    {outcome:32}{num:>8}")
    for name, process in record["processes"].items():
        first, last = process["first"], process["last"]
        print(
            f"{name:8}{first['resident_mib']:>10} to {last['resident_mib']} MiB at rest, at most "
            f"{process['greatest_resident_mib']}; {process['mb_per_hour']} ± {process['standard_error']} MB an hour; "
            f"{process['fds_at_rest']} fds, {process['threads_at_rest']} threads"
        )
    for violation in record["violations"] + record["not_free_at_rest"] + record.get("not_as_one_server", []):
        print(f"!   {violation[:400]}")
    for goal, is_reached in record["goals_reached"].items():
        print(f"{'?' if is_reached is None else 'yes' if is_reached else 'NO':4} {goal}")
