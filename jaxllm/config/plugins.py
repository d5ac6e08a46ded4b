"""Plugins are functions that installed packages name in the entry-point group `jaxllm.plugins`.

They run in each process that resolves engine arguments, before it does, and register models, for example with
`register_model("MyForCausalLM", "my_package.my_model:MY_FAMILY")`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

from jaxllm.config.environment import plugin_names

GROUP = "jaxllm.plugins"

logger = logging.getLogger(__name__)


class PluginLoader:
    """Run plugins once, however often and from however many threads it is called."""

    def __init__(self, find: Callable[[], Iterable[EntryPoint]], names: Callable[[], list[str] | None]) -> None:
        """`find` returns the installed plugins, `names` the names of those to load; None stands for all."""
        self._find = find
        self._names = names
        self._lock = threading.RLock()
        self._has_begun = False

    def load(self) -> None:
        """Run the plugins, unless they have run before; a plugin that fails is logged by name and left out."""
        with self._lock:
            if self._has_begun:  # perhaps by this very thread, in a plugin
                return
            self._has_begun = True
            wanted, plugins = self._names(), list(self._find())
            for name in wanted or ():
                if all(plugin.name != name for plugin in plugins):
                    logger.warning("JAXLLM_PLUGINS: no plugin %r is installed", name)
            for plugin in plugins:
                if wanted is None or plugin.name in wanted:
                    _run(plugin)


def _run(plugin: EntryPoint) -> None:
    try:
        plugin.load()()
    except Exception:  # a plugin may raise anything, and the engine can do without it
        logger.exception("plugin %r (%s) failed", plugin.name, plugin.value)
    else:
        logger.info("loaded plugin %r (%s)", plugin.name, plugin.value)


_PLUGINS = PluginLoader(lambda: entry_points(group=GROUP), plugin_names)
"""The process's loader: plugins act on the whole process, so no engine can own them."""

load_plugins = _PLUGINS.load
