"""Plugins are functions that installed packages name in the entry-point group `jaxllm.plugins`.

They run in each process that resolves engine arguments, before it does: there they register models of their own, as
`register_model("MyForCausalLM", "my_package.my_model:MY_FAMILY")` does.
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
    """A loader runs plugins once, however often and from however many threads it is asked to."""

    def __init__(self, find: Callable[[], Iterable[EntryPoint]], names: Callable[[], list[str] | None]) -> None:
        """`find` returns what is installed, `names` the plugins to load; None stands for all."""
        self._find = find
        self._names = names
        self._lock = threading.RLock()
        self._has_begun = False

    def load(self) -> None:
        """Run the plugins, unless that was done before; those that fail are logged by name and left out."""
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
    except Exception:  # a plugin may raise anything, and the engine may do without it
        logger.exception("plugin %r (%s) failed", plugin.name, plugin.value)
    else:
        logger.info("loaded plugin %r (%s)", plugin.name, plugin.value)


PLUGINS = PluginLoader(lambda: entry_points(group=GROUP), plugin_names)
"""The process's: plugins act on the whole process, so no engine can own them."""

load_plugins = PLUGINS.load
