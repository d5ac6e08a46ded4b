"""The version of jaxllm, in its own module so that any other may import it."""

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
