"""Decisions: questions about a state, answered by the probabilities of their options."""
