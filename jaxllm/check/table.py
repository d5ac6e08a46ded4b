"""Write the report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxllm.check.report import ENCODE_CLIP, Bound, Change, GroupReport, MediaReport, Program, Report

_GIB = 2**30


def render(report: Report) -> str:
    """Return the report as lines of text."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    settings, hardware = report.engine, report.hardware
    compilers = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    verdict = "FITS" if report.fits else "DOES NOT FIT"
    used = f"{report.tensor_parallel_size} of {_many(report.num_devices, 'device')}"
    yield f"{verdict}: {report.model} ({report.architecture}) on {report.topology}, {used} ({hardware.device_kind})"
    if report.reason is not None:
        yield f"  {report.reason}"
    yield f"  {compilers}"
    yield f"  {', '.join(f'{name}={value}' for name, value in settings.items())}"
    yield ""
    yield from _memory(report)
    yield from _changes(report.changes)
    yield from _media(report.media)
    if report.fits:
        yield ""
        yield from _requests(report)
        yield ""
        yield from _collectives(report.programs)
        yield ""
        yield from _bounds(report)
    for note in report.notes:
        yield ""
        yield f"Note: {note}"


def _memory(report: Report) -> Iterator[str]:
    memory = report.memory
    rows = [("Memory of each device", "GiB", "bytes")]
    rows += [_bytes_row("the engine may use", memory.limit), _bytes_row("parameters", memory.params)]
    if memory.draft_params:
        rows.append(_bytes_row("parameters of the draft model", memory.draft_params))
    if memory.scratch is not None:
        rows.append(_bytes_row("scratch of the largest step", memory.scratch))
    if memory.num_blocks:
        left = memory.limit - memory.params - memory.draft_params - (memory.scratch or 0) - memory.kv_cache
        size = report.engine["block_size"]
        rows += [_bytes_row(_blocks(group, size), group.num_blocks * group.block) for group in memory.groups]
        if memory.state_slots:
            name = f"{memory.state_slots:,} slots of recurrent state, {memory.state_slot:,} bytes each"
            rows.append(_bytes_row(name, memory.state_slots * memory.state_slot))
        if memory.draft_block:
            name = f"{memory.num_blocks:,} blocks of the draft model, {memory.draft_block:,} bytes each"
            rows.append(_bytes_row(name, memory.num_blocks * memory.draft_block))
        rows.append(_bytes_row("left over", left))
    yield from _table(rows)
    if memory.replicated_params:
        names = sorted(
            {".".join(part for part in name.split(".") if not part.isdigit()) for name in memory.replicated_params}
        )
        yield f"  whole on every device: {', '.join(names)}"


def _media(media: MediaReport | None) -> Iterator[str]:
    if media is None:
        return
    yield ""
    items, tower = ("Sounds", "audio tower") if media.sounds else ("Images and videos", "vision tower")
    if media.sounds and media.pictures:
        items, tower = "Images, videos and sounds", "towers"
    rows = [(f"{items}, on each device", "GiB", "bytes")]
    rows.append(_bytes_row(f"parameters of the {tower}, among the model's", media.tower_params))
    rows.append(_bytes_row(f"feature cache of {media.cache_rows:,} rows, in the scratch", media.cache))
    yield from _table(rows)
    for picture in media.pictures:
        refused = "" if picture.rows <= media.cache_rows else ": refused, raise --max-num-batched-tokens for it"
        yield f"  a picture of {picture.side:,} x {picture.side:,} pixels takes {picture.rows:,} rows{refused}"
    for sound in media.sounds:
        refused = "" if sound.rows <= media.cache_rows else ": refused, raise --max-model-len for it"
        yield f"  a sound of {sound.seconds:g} s takes {sound.rows:,} rows{refused}"


def _blocks(group: GroupReport, block_size: int) -> str:
    reach = "" if group.window is None else f", window {group.window:,}"
    if group.attention_chunk is not None:
        reach = f", within chunks of {group.attention_chunk:,}"
    if group.num_frames is not None:
        reach = f", for clips of {group.num_frames:,} frames"
    if group.is_indexer:
        reach = " of indexers' keys"
    if not group.causal:
        reach = ", which last for a step"
    return f"{group.num_blocks:,} KV blocks of {block_size} tokens{reach}, {group.block:,} bytes each"


def _changes(changes: Sequence[Change]) -> Iterator[str]:
    if not changes:
        return
    yield ""
    rows = [("It would fit with (tried; the smallest change first)", "KV blocks", "context")]
    for change in changes:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.settings.items())
        rows.append((flags, f"{change.num_blocks:,}", f"{change.max_model_len:,}"))
    yield from _table(rows)


def _requests(report: Report) -> Iterator[str]:
    rows = [("Requests at once, by length (prompt and output)", "requests")]
    if report.engine.get("runner") == "pooling":
        rows = [("Texts of a step, by length", "texts")]
    rows += [(f"{each.length:,} tokens", f"{each.requests:,}") for each in report.concurrency]
    yield from _table(rows)


def _collectives(programs: Sequence[Program]) -> Iterator[str]:
    rows = [("Steps as compiled, and their collectives", "count", "bytes", "scratch", "code", "compiled in")]
    for program in programs:
        sizes = (f"{program.scratch_bytes / 2**20:.1f} MiB", f"{program.code_bytes / 2**20:.1f} MiB")
        size = f"{program.num_tokens:,} tokens of up to {program.num_seqs} requests"
        encoded = f"{program.num_tokens:,} {'frames' if program.name == ENCODE_CLIP else 'patches'}"
        name = f"{program.name}: {size if program.num_seqs else encoded}"
        rows.append((name, "", "", *sizes, f"{program.compile_seconds:.0f} s"))
        for collective in program.collectives:
            where = " (each pass of a loop over rows)" if collective.repeated else ""
            rows.append((f"  {collective.kind}{where}", f"{collective.count:,}", f"{collective.bytes:,}", "", "", ""))
    yield from _table(rows)


def _bounds(report: Report) -> Iterator[str]:
    hardware = report.hardware
    yield (
        f"Bounds, not predictions: nothing but {hardware.bytes_per_second / 1e9:,.0f} GB/s of memory and "
        f"{hardware.flops_per_second / 1e12:,.1f} TFLOP/s of bfloat16 matmuls per device is counted."
    )
    rows = [("", "requests", "tokens each", "tokens/s at most", "bound by")]
    rows += [_bound_row(bound) for bound in report.bounds]
    yield from _table(rows)


def _bound_row(bound: Bound) -> tuple[str, ...]:
    return (bound.phase, f"{bound.batch:,}", f"{bound.length:,}", f"{bound.tokens_per_second:,.0f}", bound.limited_by)


def _bytes_row(name: str, size: int) -> tuple[str, str, str]:
    return name, f"{size / _GIB:.2f}", f"{size:,}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Align columns: the first to the left under its heading, the others to the right."""
    indented = [rows[0], *((f"  {row[0]}", *row[1:]) for row in rows[1:])]
    widths = [max(len(row[column]) for row in indented) for column in range(len(rows[0]))]
    for row in indented:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
