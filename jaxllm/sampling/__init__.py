"""Logits become tokens on the device: pure jnp, one row never looks at another."""
