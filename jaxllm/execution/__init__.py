"""A step's plan becomes its tokens here, by fixed-shape batches, compiled programs and the KV pool."""
