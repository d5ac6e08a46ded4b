"""Decode sounds and turn them into what audio towers read."""
