"""`SpeculativeConfig`: how tokens are guessed ahead. The fields are vLLM's."""

from __future__ import annotations

import dataclasses

from jaxllm.config.groups import check_refused, refused
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_float, check_int, check_str, shown
from jaxllm.speculation.drafter import SpeculationSettings

GROUP = "speculative_config"
METHODS = ("ngram", "suffix", "draft_model", "mtp", "eagle3")
MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""Older names of "mtp", by the models that it is for."""
HEADS = ("mtp", "eagle3")
"""The methods of draft heads, which read the model's features of its tokens."""
MAX_DRAFTS = 64
"""The largest `num_speculative_tokens`; more drafts never pay."""
_MAX_NGRAM = 64
MAX_DEPTH = 256
_MAX_CACHED_REQUESTS = 1_000_000
_MAX_NAME = 4_096
_NAMES = ("revision", "quantization", "kv_cache_dtype")
_SIZES = ("max_model_len", "draft_tensor_parallel_size", "tensor_parallel_size")
"""The fields of a draft model: names, and numbers from 1 on."""
_OF_CHECKPOINT = ("revision", "quantization")
"""The fields that describe a checkpoint, which is the model's own with "mtp"."""
_NGRAM_MODELS = ("ngram", "[ngram]")
_NO_MODEL = "no draft model takes part"
_OWN_LAYER = "a layer of the model itself guesses"
_KERNELS = "the draft model has the kernels that the other model has"
_ONE_BY_ONE = "guesses are made one after the other"
_VERIFICATION = "a draft counts if it is the token that is sampled"
_NUM_DRAFTS = {"ngram": 16, "suffix": 24, "draft_model": 8, "mtp": 3, "eagle3": 6}
"""The most drafts of a request in a step by default."""


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """The settings of speculation, which changes no token: each draft is compared with the sampled token."""

    method: str | None = None
    """The drafter: "ngram" finds what followed the last tokens before in the same request, "suffix" what followed most
    often, in past answers too, and "draft_model" asks a smaller model with the same tokens. "mtp" asks the
    prediction layer that some checkpoints have after the last layer, and "eagle3" a head that was trained to guess this
    model's tokens."""
    num_speculative_tokens: int | None = None
    """The most drafts of a request in a step; fewer are made if fewer are accepted."""
    model: str | None = None
    """The draft model, or the EAGLE-3 head: a folder, file or hub id. The name "ngram" means the method of that
    name."""
    revision: str | None = None
    """The draft model's revision on the hub."""
    quantization: str | None = None
    """The way in which the draft model's weights are rounded, as in the engine argument `quantization`."""
    kv_cache_dtype: str | None = None
    """The dtype of the draft model's keys and values; None is that of its weights."""
    max_model_len: int | None = None
    """The longest request that the draft model guesses for; by default the shorter of both models' contexts."""
    draft_tensor_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    """The number of devices of the draft model, which must be the model's."""
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    """The most and the fewest last tokens that "ngram" looks for; 4 and 2 if neither is set."""
    suffix_decoding_max_tree_depth: int = 24
    """The most last tokens that "suffix" looks for."""
    suffix_decoding_max_cached_requests: int = 10_000
    """The answers that "suffix" keeps, the latest ones; 0 keeps none."""
    suffix_decoding_max_spec_factor: float = 1.0
    """The most drafts of "suffix", as a multiple of the matching tokens."""
    suffix_decoding_min_token_prob: float = 0.1
    """A draft of "suffix" must have followed at least this share of the matches."""
    enforce_eager: None = refused(None, "programs of steps with drafts are those of all steps")
    moe_backend: None = refused(None, _KERNELS)
    attention_backend: None = refused(None, _KERNELS)
    code_revision: None = refused(None, "no code is taken from a checkpoint")
    draft_load_config: None = refused(None, "the draft model is loaded as the other one is")
    index_share_for_mtp_iteration: None = refused(None, "no model here attends to tokens that an index picks")
    disable_padded_drafter_batch: bool = refused(False, "steps of a draft model are padded as all steps are")
    disable_eagle_block_drop: bool = refused(False, "no block of a prefix is dropped for a draft head")
    use_local_argmax_reduction: bool = refused(False, "guesses are drawn as tokens are")
    use_heterogeneous_vocab: bool = refused(False, "a draft model must have the same tokens")
    parallel_drafting: bool = refused(False, _ONE_BY_ONE)
    num_speculative_tokens_per_batch_size: None = refused(None, "the number follows the batch by itself")
    rejection_sample_method: str = refused("standard", _VERIFICATION)
    synthetic_acceptance_rates: None = refused(None, _VERIFICATION)
    synthetic_acceptance_length: None = refused(None, _VERIFICATION)
    enable_adaptive_verification: bool = refused(False, "the number of drafts adapts by itself")
    draft_sample_method: str = refused("greedy", "drafts are drawn with the noise of the tokens that they guess")
    dspark_draft_topk: None = refused(None, _ONE_BY_ONE)

    def __post_init__(self) -> None:
        check_refused(GROUP, self)
        self._check_method()
        self._check_draft_model()
        self._check_int("num_speculative_tokens", MAX_DRAFTS, optional=True)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            self._check_int(name, _MAX_NGRAM, optional=True)
        least, most = self.lookup
        if least > most:
            message = f"{GROUP}: prompt_lookup_min={least} must be at most prompt_lookup_max={most}."
            raise VLLMValidationError(message, parameter=GROUP, value=least)
        self._check_int("suffix_decoding_max_tree_depth", MAX_DEPTH, least=3)
        self._check_int("suffix_decoding_max_cached_requests", _MAX_CACHED_REQUESTS, least=0)
        self._check_float("suffix_decoding_max_spec_factor", 0.0, 100.0)
        self._check_float("suffix_decoding_min_token_prob", 0.0, 1.0)

    @property
    def lookup(self) -> tuple[int, int]:
        """Return the fewest and the most last tokens that "ngram" looks for; one that is not set equals the other."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            return 2, 4
        return (most if least is None else least) or 1, (least if most is None else most) or 1

    @property
    def drafter(self) -> str:
        """Return the method, by default that of the named model."""
        if self.method is not None:
            return "mtp" if self.method in MTP_NAMES else self.method
        return "ngram" if self.model is None or self.model in _NGRAM_MODELS else "draft_model"

    def settings(self, num_free_rows: float) -> SpeculationSettings:
        """Return the settings for a device where a step of `num_free_rows` rows takes twice as long as one of 1 row."""
        method = self.drafter
        least, most = self.lookup
        return SpeculationSettings(
            method=method,
            num_speculative_tokens=self.num_speculative_tokens or _NUM_DRAFTS[method],
            num_free_rows=num_free_rows,
            prompt_lookup_min=least,
            prompt_lookup_max=most,
            max_tree_depth=self.suffix_decoding_max_tree_depth,
            max_cached_requests=self.suffix_decoding_max_cached_requests,
            max_spec_factor=self.suffix_decoding_max_spec_factor,
            min_token_prob=self.suffix_decoding_min_token_prob,
        )

    def _check_method(self) -> None:
        if self.model is not None:
            check_str(f"{GROUP}.model", self.model, _MAX_NAME, parameter=GROUP)
        if (self.method is None and not self.model) or (self.method is not None and self.drafter not in METHODS):
            message = f"{GROUP}: method={shown(self.method)} is not supported; use one of {', '.join(METHODS)}."
            raise VLLMValidationError(message, parameter=GROUP, value=self.method)
        names_ngram, needs_model = self.model in _NGRAM_MODELS, self.drafter in ("draft_model", "eagle3")
        if needs_model and (not self.model or names_ngram):
            what = "an EAGLE-3 head of this model" if self.drafter in HEADS else "a smaller model with the same tokens"
            message = f"{GROUP}: method={self.drafter!r} needs model, the name of {what}."
            raise VLLMValidationError(message, parameter=GROUP, value=self.model)
        if self.model is not None and not needs_model and not (self.drafter == "ngram" and names_ngram):
            why = _OWN_LAYER if self.drafter in HEADS else _NO_MODEL
            message = f"{GROUP}: model={shown(self.model)} does not go with method={self.method!r}: {why}."
            raise VLLMValidationError(message, parameter=GROUP, value=self.model)

    def _check_draft_model(self) -> None:
        has_model = self.drafter in ("draft_model", *HEADS)
        for name in _OF_CHECKPOINT if self.drafter == "mtp" else () if has_model else _NAMES + _SIZES:
            if (value := getattr(self, name)) is not None:
                why = _OWN_LAYER if has_model else _NO_MODEL
                message = f"{GROUP}: {name}={shown(value)} does not go with method={self.drafter!r}: {why}."
                raise VLLMValidationError(message, parameter=GROUP, value=value)
        for name in _NAMES:
            if (value := getattr(self, name)) is not None:
                check_str(f"{GROUP}.{name}", value, _MAX_NAME, parameter=GROUP)
        for name in _SIZES:
            self._check_int(name, INT32_MAX, optional=True)

    def _check_int(self, name: str, most: int, *, least: int = 1, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            check_int(f"{GROUP}.{name}", value, least, most, parameter=GROUP)

    def _check_float(self, name: str, least: float, most: float) -> None:
        check_float(f"{GROUP}.{name}", getattr(self, name), least, most, parameter=GROUP)
