"""Fetch and decode the images and videos of prompts, within limits. Nothing here needs JAX."""
