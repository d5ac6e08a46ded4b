"""New weights for a model that runs: checked, brought to the arrays' form on the devices, and put in place at once."""
