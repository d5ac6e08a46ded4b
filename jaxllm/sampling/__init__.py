"""Sample tokens from logits on the device, in pure jnp; rows are independent."""
