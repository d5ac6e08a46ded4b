"""The families of models: each file reads like the architectures it serves."""
