"""Between text and token ids: tokenizers, chat templates, detokenizing, log-probabilities with their tokens' text."""
