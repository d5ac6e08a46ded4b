"""Rewrite JSON Schemas into those that llguidance can hold a model to."""
