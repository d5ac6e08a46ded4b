"""The fixtures that several files of this folder use."""

from tests.quick_engine import quick_compile

__all__ = ["quick_compile"]
