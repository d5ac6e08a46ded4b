"""Decisions: questions about a state, answered by probabilities, in the forms of vLLM and OpenAI."""
