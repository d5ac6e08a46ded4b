"""What an engine is used for, under vLLM's import path; no usage statistics are collected."""
