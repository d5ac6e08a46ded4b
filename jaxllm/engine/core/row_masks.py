"""The masks of the tokens that each row of a step may sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.constraints.bits import RowMask
    from jaxllm.constraints.token_masks import TokenMasks
    from jaxllm.scheduling.plan import StepPlan


def rows_masks(plan: StepPlan, masks: TokenMasks) -> list[RowMask | None]:
    """Return the mask of each row, those of the chunks' last tokens first; None where a row may sample everything."""
    if masks.is_empty:
        return [None] * plan.num_rows
    last_masks: list[RowMask | None] = []
    extra: list[RowMask | None] = []
    decodes = plan.decodes
    for owner, start in zip(decodes.owners, decodes.starts, strict=True):
        last_masks.append(masks.row(owner.request_id, start + 1 - owner.num_prompt_tokens))
    for chunk in plan.others:
        if chunk.num_drafts:
            num_outputs = chunk.num_output_tokens - chunk.num_drafts
            *before, last = masks.rows(chunk.request_id, num_outputs, chunk.drafts)
            last_masks.append(last)
            extra += before
            continue
        last_masks.append(masks.row(chunk.request_id, chunk.num_output_tokens) if chunk.samples else None)
        extra += [None] * len(chunk.scored_ids)
    return last_masks + extra
