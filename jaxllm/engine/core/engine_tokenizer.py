"""Load the tokenizer that an engine's arguments name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jaxllm.config.arguments import EngineArguments
from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from jaxllm.loading.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


def load_engine_tokenizer(args: EngineArguments, checkpoint: Checkpoint, cache_dir: str) -> Tokenizer | None:
    """Load the tokenizer that an engine is to have: its checkpoint's, another, or None. Raises VLLMValidationError."""
    if args.skip_tokenizer_init:
        return None
    is_own = args.tokenizer == args.model and args.tokenizer_revision is None
    try:
        tokenizer = load_tokenizer(
            checkpoint,
            cache_dir,
            name=None if is_own else args.tokenizer,
            revision=args.tokenizer_revision,
            hf_token=args.hf_token,
            download_dir=args.download_dir,
        )
    except VLLMValidationError as error:
        if args.tokenizer_mode != "mistral":
            raise
        message = f"tokenizer_mode='mistral' works only where there is a tokenizer.json or tekken.json. {error}"
        raise VLLMValidationError(message, parameter="tokenizer_mode", value="mistral") from error
    if args.tokenizer_mode == "mistral":
        logger.info("tokenizer_mode='mistral': tokenizer.json or tekken.json is used, by the tokenizers library")
    return tokenizer
