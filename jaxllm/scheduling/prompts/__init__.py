"""The tokens of prompts in a step: step times, and shares."""
