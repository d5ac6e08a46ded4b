"""Work that would keep others waiting is done in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONG = 2000
"""Work on more characters, ids or numbers than these is long."""


async def aside[**P, T](size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, in a thread if the size of what it works on is long."""
    return await asyncio.to_thread(function, *args, **kwargs) if size > LONG else function(*args, **kwargs)
