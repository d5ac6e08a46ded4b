"""Run the steps that the scheduler plans: fixed-shape batches, compiled programs and the KV pool."""
