"""The version of jaxllm, by itself so that any module may ask for it."""

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
