"""Text becomes token ids and back here: tokenizers, chat templates, detokenizing, log-probabilities with text."""
