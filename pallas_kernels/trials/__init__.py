"""Runs of every op on made-up steps, for the self check and the tests: ragged lengths and poisoned memory.

Each module makes the steps of some ops and compares what they return with the ops' references.
"""
