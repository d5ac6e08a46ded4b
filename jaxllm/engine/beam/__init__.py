"""Beam search on an engine's log-probabilities."""
