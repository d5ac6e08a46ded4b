"""From a step's plan to its tokens: fixed-shape batches, compiled programs, the KV pool."""
