"""Steering: vectors that requests add to the residual stream of a model."""
