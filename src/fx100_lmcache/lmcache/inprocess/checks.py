"""Which set-ups the in-process plugin serves, which it refuses, and what it warns of."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fx100_lmcache.errors import FX100Error
from fx100_lmcache.findings import Finding, warning
from fx100_lmcache.lmcache.inprocess.forward_pass import find_connector

CRYPTOGRAPHIC_HASHES = frozenset({"sha256", "sha256_cbor", "sha256_cbor_64bit"})
"""Hashes that vLLM 0.32 starts from a fixed seed; for all others PYTHONHASHSEED decides."""

STABLE_HASH = "pre_caching_hash_algorithm: sha256_cbor"


SUBJECT = "in-process: settings"


class UnsupportedSetupError(FX100Error):
    """LMCache or vLLM is set up in a way that this plugin does not serve.

    One line, as LMCache only logs what a plugin's constructor raises.

    Attributes
    ----------
    found : str
        The setting, as it is.
    why : str
        What would go wrong.
    """

    def __init__(self, found: str, why: str, remedy: str) -> None:
        super().__init__(found, why, remedy=remedy)
        self.found = found
        self.why = why

    @property
    def what(self) -> str:
        """The setting and what would go wrong."""
        return f"{self.found}: {self.why}"

    def __str__(self) -> str:
        return f"{self.what} (do: {self.remedy})"


@dataclass(frozen=True)
class Host:
    """What vLLM says of itself, where it can be asked.

    Attributes
    ----------
    max_model_tokens : int or None
        Longest context.
    cache_dtype : str or None
        ``--kv-cache-dtype``.
    load_failure_policy : str or None
        What vLLM does when a promised load fails.
    data_parallel_rank : int
        Replica of this engine; 0 without data parallelism.
    hears_of_layers : bool
        Whether it can be told of a layer that was not loaded.
    several_hosts : bool
        Whether ranks of this engine are on other hosts, or Ray may put them there.
    """

    max_model_tokens: int | None = None
    cache_dtype: str | None = None
    load_failure_policy: str | None = None
    data_parallel_rank: int = 0
    hears_of_layers: bool = True
    several_hosts: bool = False


def ask_vllm(engine_id: str | None) -> Host:
    """Return what vLLM says; nothing where LMCache runs without it."""
    # every replica's engine id ends so, also where vLLM makes the replicas independent
    replica = re.search(r"_dp(\d+)$", engine_id or "")
    rank = int(replica[1]) if replica else 0
    module = sys.modules.get("vllm.config")  # loaded, if vLLM is what runs here
    current = getattr(module, "get_current_vllm_config_or_none", lambda: None)()
    hears_of_layers = find_connector() is not None
    if current is None:
        return Host(data_parallel_rank=rank, hears_of_layers=hears_of_layers)
    transfer = current.kv_transfer_config
    return Host(
        current.model_config.max_model_len,
        str(current.cache_config.cache_dtype),
        None if transfer is None else transfer.kv_load_failure_policy,
        rank,
        hears_of_layers,
        _over_several_hosts(current.parallel_config),
    )


def _over_several_hosts(parallel: Any) -> bool:
    if parallel.world_size == 1:
        return False
    return bool(parallel.distributed_executor_backend == "ray" or parallel.nnodes_within_dp > 1)


def check_hash(algorithm: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a chunk hash that is another one after a restart.

    Raises
    ------
    UnsupportedSetupError
        If nothing that is stored could ever be found again.
    """
    seed = environment.get("PYTHONHASHSEED", "random")
    if seed != "random":
        return
    if algorithm in CRYPTOGRAPHIC_HASHES and importlib.util.find_spec("vllm") is not None:
        return
    raise UnsupportedSetupError(
        f"pre_caching_hash_algorithm is {algorithm!r} and PYTHONHASHSEED is not set",
        "every start hashes differently, so nothing stored would ever be found again",
        f"set {STABLE_HASH} in LMCache's configuration (or PYTHONHASHSEED=0 for every process)",
    )


def check_setup(config: Any, metadata: Any, local_cpu_backend: Any) -> None:
    """Refuse what this plugin does not serve.

    Parameters
    ----------
    config, metadata, local_cpu_backend
        What LMCache gives to a plugin's constructor.

    Raises
    ------
    UnsupportedSetupError
        Names the setting, and what to do.
    """
    if config is None or metadata is None:
        raise UnsupportedSetupError(
            "LMCache gave no config or metadata to the plugin",
            "it cannot know its rank and its volume",
            "have LMCache load it: see configs/lmcache-inprocess.yaml",
        )
    if metadata.role == "scheduler":
        raise UnsupportedSetupError(
            "enable_scheduler_bypass_lookup is on",
            "the scheduler process cannot look into the stores of the ranks",
            "set enable_scheduler_bypass_lookup: false",
        )
    for setting, why in _REFUSED.items():
        if getattr(config, setting, False):
            raise UnsupportedSetupError(f"{setting} is on", why, f"set {setting}: false")
    if config.use_layerwise and config.enable_async_loading:
        raise UnsupportedSetupError(
            "use_layerwise and enable_async_loading are both on",
            "LMCache would load everything twice",
            "set one of them to false",
        )
    if local_cpu_backend is None:
        raise UnsupportedSetupError(
            "there is no LocalCPUBackend",
            "loads and puts take their memory from it",
            "set max_local_cpu_size above 0",
        )
    _check_first_rank(config, metadata)


_REFUSED = {
    "enable_blending": "blended chunks are not prefixes, and their positions are not kept",
    "enable_p2p": "chunks on NVMe cannot be moved to a peer",
    "enable_controller": (
        "the controller's move, compress and decompress do not know chunks on NVMe"
    ),
    "enable_pd": "disaggregated prefill keeps its memory in a backend of its own",
}


def _check_first_rank(config: Any, metadata: Any) -> None:
    first_only = saves_only_first_rank(config, metadata)
    if first_only and not config.use_layerwise and not metadata.is_first_rank():
        raise UnsupportedSetupError(
            f"rank {metadata.worker_id} looks up what only the first rank stores",
            "nothing is ever found",
            "remove lookup_server_worker_ids from LMCache's configuration",
        )


def saves_only_first_rank(config: Any, metadata: Any) -> bool:
    """Whether LMCache stores one copy for all ranks, as it does for MLA."""
    wanted = config.get_extra_config_value("save_only_first_rank", metadata.use_mla)
    return bool(wanted and metadata.use_mla)


def warnings_for(config: Any, host: Host, plugin_names: list[str]) -> Iterator[Finding]:
    """Yield what is wrong with a set-up that is served all the same.

    Parameters
    ----------
    plugin_names : list of str
        Names under which `storage_plugins` loads us.
    """
    if host.load_failure_policy not in (None, "recompute"):
        yield warning(
            SUBJECT,
            f"kv_load_failure_policy is {host.load_failure_policy!r}",
            "a failed read fails the request",
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    if config.enable_async_loading and config.local_cpu:
        yield warning(
            SUBJECT,
            "enable_async_loading with local_cpu",
            "LMCache frees memory that it still uses, and the engine dies at the third request of "
            "a prefix",
            "set local_cpu: false",
        )
    if config.use_layerwise and not host.hears_of_layers:
        yield warning(
            SUBJECT,
            "use_layerwise",
            "LMCache does not look whether the load of a layer worked, and there is no vLLM here "
            "to report it to, so a failed read stops the engine",
            "set use_layerwise: false",
        )
    if config.use_layerwise and config.local_cpu:
        yield warning(
            SUBJECT,
            "use_layerwise with local_cpu",
            "LMCache stops the engine when a prefix lies partly in memory and partly on NVMe",
            "set local_cpu: false",
        )
    for setting in ("retrieve_locations", "store_location"):
        chosen = getattr(config, setting, None)
        listed = [chosen] if isinstance(chosen, str) else chosen
        if listed and plugin_names and not set(plugin_names) & set(listed):
            yield warning(
                SUBJECT,
                f"{setting} leaves this plugin out",
                "it is never asked",
                f"add {plugin_names[0]!r}",
            )
    if config.get_extra_config_value("audit_backend_enabled", False):
        yield warning(
            SUBJECT,
            "audit_backend_enabled",
            "LMCache's wrapper looks chunks up one by one and cannot clear",
            "set audit_backend_enabled: false",
        )


def check_hosts(config: Any, metadata: Any, host: Host) -> Iterator[Finding]:
    """Say that ranks on other hosts do not hear of failed loads; nothing where none need to."""
    if not host.several_hosts or config.enable_async_loading:
        return
    if not saves_only_first_rank(config, metadata):
        yield warning(
            SUBJECT,
            "ranks of this engine may be on other hosts",
            "those do not hear of a load that failed here, and may keep what is computed on top",
            "set enable_async_loading: true, which reads before anything is computed",
        )


def check_staging(
    config: Any, host: Host, chunk_bytes: int, chunk_tokens: int, staging_bytes: int
) -> Iterator[Finding]:
    """Say what is wrong with the host memory that loads go through; nothing if it is enough.

    Parameters
    ----------
    chunk_bytes, chunk_tokens : int
        Size of a full chunk on this rank.
    staging_bytes : int
        Size of LMCache's pool, `max_local_cpu_size`.

    Raises
    ------
    UnsupportedSetupError
        If nothing of a session that does not fit could be used, as it is layer by layer.
    """
    tokens = staging_bytes // chunk_bytes * chunk_tokens
    wanted = host.max_model_tokens
    if wanted is None or tokens >= wanted:
        return
    needed_gib = -(-wanted // chunk_tokens) * chunk_bytes / 2**30
    found = f"max_local_cpu_size holds {tokens} tokens of this rank, a context may have {wanted}"
    do = f"set max_local_cpu_size: {needed_gib:.2f} or more"
    if config.use_layerwise:
        why = "with use_layerwise nothing of a session that does not fit can be used"
        raise UnsupportedSetupError(found, why, do)
    why = "longer sessions are loaded in part and the rest is computed"
    yield warning(SUBJECT, found, why, do)
