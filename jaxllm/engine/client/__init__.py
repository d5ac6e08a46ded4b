"""Clients of engine cores that run in a process, thread or actor of their own: one core, or replicas of one model."""
