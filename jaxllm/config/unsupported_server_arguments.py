"""vLLM's server flags that are not supported: each accepts vLLM's default and is refused otherwise."""

# Fields are declared by calls that make dataclass fields, which ruff takes for shared default values.

from __future__ import annotations

import dataclasses

from jaxllm.config.kinds import unsupported

_COHERE = "Cohere's chat is not served; use OpenAI's"
_FINGERPRINT = "answers have no system_fingerprint; /version says which server it is"
_GRPC = "gRPC is served beside HTTP, not in place of it; use grpc_port"
_ONE_SERVER = "a server has one engine, with replicas; start several servers, with a proxy in front of them"
_OUTPUTS = "outputs are not logged; enable_log_requests logs what was asked"
_TOOLS = "tools are called by clients; the server runs none itself"


@dataclasses.dataclass(kw_only=True)
class UnsupportedServerArguments:
    """One row per argument: its default, why other values are refused, and in `also` the values that mean the same.

    A row moves to `ServerArgs` when its argument is supported.
    """

    tool_server: str | None = unsupported(None, _TOOLS)
    fingerprint_mode: str = unsupported("none", _FINGERPRINT)
    fingerprint_value: str | None = unsupported(None, _FINGERPRINT)
    cohere_is_reasoning_model: bool = unsupported(True, _COHERE, also=(False,))
    cohere_format: str = unsupported("cmd4", _COHERE)
    enable_flash_late_interaction: bool = unsupported(
        True, "scores by late interaction are computed on the host", also=(False,)
    )
    enable_per_request_metrics: bool = unsupported(False, "answers have no times; see /metrics")
    enable_log_outputs: bool = unsupported(False, _OUTPUTS)
    enable_log_deltas: bool = unsupported(True, _OUTPUTS, also=(False,))
    log_error_stack: bool = unsupported(False, "errors that are the server's own are always logged, with their stack")
    enable_offline_docs: bool = unsupported(False, "/docs loads its page from elsewhere; /openapi.json is the server's")
    grpc: bool = unsupported(False, _GRPC)
    data_parallel_supervisor_port: int = unsupported(9256, _ONE_SERVER)
    dp_supervisor_probe_interval_s: float = unsupported(5.0, _ONE_SERVER, also=(5,))
    dp_supervisor_probe_timeout_s: float = unsupported(5.0, _ONE_SERVER, also=(5,))
    dp_supervisor_probe_failure_threshold: int = unsupported(3, _ONE_SERVER)
