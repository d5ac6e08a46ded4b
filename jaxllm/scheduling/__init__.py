"""Decide which tokens run in the next step, and in which blocks their keys and values lie. Pure Python."""
