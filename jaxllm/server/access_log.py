"""The path of the filter `NotTheseEndpoints` in older files for `--log-config-file`."""

from jaxllm.server.http.access_log import NotTheseEndpoints

__all__ = ["NotTheseEndpoints"]
