"""`PoolerConfig`: how a pooling model makes an output of hidden states, if not in the model's own way."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from jaxllm.config.groups import check_refused, refused
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_bool, check_float, check_int, check_ints, shown
from jaxllm.pooling_params import MAX_RETURNED, TASKS

_GROUP = "pooler_config"
_SEQ_POOLING_TYPES = ("CLS", "LAST", "MEAN")
_TOK_POOLING_TYPES = ("ALL", "STEP")
_MAX_LOGIT = 1e30
_GONE_TASKS = {"score": "use 'classify'", "encode": "use 'token_embed' or 'token_classify'"}
_ONE_PASS = "a text goes through the model in one piece; cut longer ones with truncate_prompt_tokens"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PoolerConfig:
    """The settings of pooling; None is the model's own."""

    task: str | None = None
    """The only task that requests may have: "embed", "classify", "token_embed" or "token_classify"."""
    pooling_type: str | None = None
    """A value of `seq_pooling_type` or of `tok_pooling_type`, whichever has it."""
    seq_pooling_type: str | None = None
    """The output of a sequence: its first token's ("CLS"), its last one's ("LAST"), or the mean of all ("MEAN")."""
    tok_pooling_type: str | None = None
    """The tokens that token tasks return outputs of: "ALL", or with "STEP" those that equal `step_tag_id`."""
    use_activation: bool | None = None
    """False returns embeddings that are not normalized, and class scores without sigmoid or softmax."""
    enable_flash_late_interaction: bool = True
    """It has no effect: late interaction is computed on the host."""
    dimensions: int | None = None
    """The number of dimensions that embeddings are cut to, by default."""
    enable_chunked_processing: bool = refused(False, _ONE_PASS)
    max_embed_len: int | None = refused(None, _ONE_PASS)
    logit_mean: float | None = None
    """A number that is subtracted from class scores before their activation."""
    logit_sigma: float | None = None
    """A number that class scores are divided by after that."""
    step_tag_id: int | None = None
    """The token that "STEP" pooling returns the outputs of."""
    returned_token_ids: list[int] | None = None
    """The indices of the numbers to return of each output, in their order."""
    logit_bias: float | None = None
    """Deprecated: see logit_mean."""
    logit_scale: float | None = None
    """Deprecated: 1 / logit_sigma."""

    def __post_init__(self) -> None:
        check_refused(_GROUP, self)
        self._check_task()
        self._check_types()
        for name in ("use_activation", "enable_flash_late_interaction"):
            if getattr(self, name) is not None or name != "use_activation":
                check_bool(f"{_GROUP}.{name}", getattr(self, name), parameter=_GROUP)
        for name, low in (("dimensions", 1), ("step_tag_id", 0)):
            if getattr(self, name) is not None:
                self._set(name, check_int(f"{_GROUP}.{name}", getattr(self, name), low, INT32_MAX, parameter=_GROUP))
        if self.returned_token_ids is not None:
            self._set("returned_token_ids", _check_returned(self.returned_token_ids))
        self._check_logits()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_task(self) -> None:
        if self.task is not None and self.task not in TASKS:
            hint = _GONE_TASKS.get(self.task) if isinstance(self.task, str) else None
            raise _error(
                f"task={shown(self.task)} is not supported: {hint or 'use one of ' + ', '.join(TASKS)}", self.task
            )

    def _check_types(self) -> None:
        """Check the types of pooling, and set the one that `pooling_type` stands for."""
        pooling_type, known = self.pooling_type, {"seq": _SEQ_POOLING_TYPES, "tok": _TOK_POOLING_TYPES}
        if pooling_type is not None:
            kind = next((kind for kind, names in known.items() if pooling_type in names), None)
            if kind is None:
                names = ", ".join(_SEQ_POOLING_TYPES + _TOK_POOLING_TYPES)
                raise _error(f"pooling_type={shown(pooling_type)} is not supported, only {names}", pooling_type)
            for level in known:
                other = getattr(self, f"{level}_pooling_type")
                # Settings from another process have both, and they agree.
                if other is not None and (level != kind or other != pooling_type):
                    raise _error(f"Cannot set both `pooling_type` and `{level}_pooling_type`", pooling_type)
            self._set(f"{kind}_pooling_type", pooling_type)
        for kind, names in known.items():
            value = getattr(self, f"{kind}_pooling_type")
            if value is not None and value not in names:
                raise _error(f"{kind}_pooling_type={shown(value)} is not supported, only {', '.join(names)}", value)

    def _check_logits(self) -> None:
        """Check the calibration of scores, and convert vLLM's older names to its newer ones."""
        for name in ("logit_mean", "logit_sigma", "logit_bias", "logit_scale"):
            value = getattr(self, name)
            if value is not None:
                value = check_float(f"{_GROUP}.{name}", value, -_MAX_LOGIT, _MAX_LOGIT, parameter=_GROUP)
                if value == 0 and name in ("logit_sigma", "logit_scale"):
                    raise _error(f"{name} cannot be 0 (division by zero)", value)
                self._set(name, value)
        for old, new in (("logit_bias", "logit_mean"), ("logit_scale", "logit_sigma")):
            value = getattr(self, old)
            if value is None:
                continue
            if getattr(self, new) is not None:
                raise _error(f"Cannot set both `{old}` and `{new}`", value)
            logger.warning("pooler_config: %s is deprecated; use %s", old, new)
            self._set(new, value if old == "logit_bias" else 1 / value)
            self._set(old, None)


def _check_returned(value: Any) -> list[int]:
    try:
        return check_ints(f"{_GROUP}.returned_token_ids", value, 0, INT32_MAX, MAX_RETURNED)
    except VLLMValidationError as error:
        raise VLLMValidationError(str(error), parameter=_GROUP, value=value) from error


def _error(message: str, value: Any) -> VLLMValidationError:
    return VLLMValidationError(f"{_GROUP}: {message}.", parameter=_GROUP, value=value)
