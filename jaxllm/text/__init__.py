"""Convert text to token ids and back: tokenizers, chat templates, detokenization, log-probabilities with text."""
