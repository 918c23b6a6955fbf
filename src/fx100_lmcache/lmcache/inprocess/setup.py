"""From what LMCache gives a plugin's constructor to what the plugin needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fx100_lmcache import config as settings
from fx100_lmcache.config import Config
from fx100_lmcache.findings import warning
from fx100_lmcache.lmcache.compat.inprocess import MOVED, root_hash
from fx100_lmcache.lmcache.inprocess.checks import (
    Host,
    UnsupportedSetupError,
    ask_vllm,
    check_hash,
    check_hosts,
    check_setup,
    check_staging,
    saves_only_first_rank,
    warnings_for,
)
from fx100_lmcache.lmcache.inprocess.keys import KeyContext
from fx100_lmcache.lmcache.versions import DEPRECATED, version_warnings
from fx100_lmcache.ondisk.geometry import round_up

log = logging.getLogger(__name__)

GIB = 2**30

ALLOCATION_BYTES = 4096
"""LMCache's allocator rounds objects up to this."""


@dataclass(frozen=True)
class Setup:
    """What one plugin works with.

    Attributes
    ----------
    path : Path
        Of our configuration.
    config : Config
        What it says.
    shard : int
        The shard of this rank.
    first_shard : int or None
        That of the engine's first rank; None if ranks have nothing to tell each other.
    staging_bytes : int
        Host memory of LMCache's pool.
    bytes_per_token : int
        Of this rank.
    """

    path: Path
    config: Config
    shard: int
    first_shard: int | None
    staging_bytes: int
    bytes_per_token: int
    key_context: KeyContext


def prepare(config: Any, metadata: Any, local_cpu_backend: Any, plugin: str) -> Setup:
    """Check everything that can be checked before a device is opened, and log warnings.

    Parameters
    ----------
    config, metadata, local_cpu_backend
        What LMCache gives.
    plugin : str
        Class name of the plugin.

    Raises
    ------
    FX100Error
        If this set-up is not served; says what to do.
    """
    check_setup(config, metadata, local_cpu_backend)
    check_hash(config.pre_caching_hash_algorithm)
    host = ask_vllm(metadata.engine_id)
    staging_bytes = int(config.max_local_cpu_size * GIB)
    chunk_bytes = _chunk_bytes(metadata)
    for each in [
        *version_warnings(),
        *([warning("LMCache inside vLLM", *DEPRECATED)] if MOVED else []),
        *warnings_for(config, host, _names(config, plugin)),
        *check_hosts(config, metadata, host),
        *check_staging(
            config,
            host,
            round_up(chunk_bytes, ALLOCATION_BYTES),
            metadata.chunk_size,
            staging_bytes,
        ),
    ]:
        log.warning(each.line)
    path, ours = _our_config(config)
    shard = _shard(config, ours, metadata, host)
    alone = metadata.world_size == 1 or saves_only_first_rank(config, metadata)
    return Setup(
        path,
        ours,
        shard,
        None if alone else shard - metadata.worker_id,
        staging_bytes,
        max(1, chunk_bytes // metadata.chunk_size),
        _key_context(config, metadata, host),
    )


def _names(config: Any, plugin: str) -> list[str]:
    """Return the names under which `storage_plugins` loads this class."""
    names = config.storage_plugins or []
    classes = {n: config.get_extra_config_value(f"storage_plugin.{n}.class_name") for n in names}
    return [name for name, class_name in classes.items() if class_name == plugin]


def _chunk_bytes(metadata: Any) -> int:
    """Size of a full chunk of this rank."""
    sizes = zip(metadata.get_shapes(), metadata.get_dtypes(), strict=True)
    return sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)


def _our_config(config: Any) -> tuple[Path, Config]:
    path = config.get_extra_config_value("fx100.config")
    if not isinstance(path, str) or not path:
        raise UnsupportedSetupError(
            "extra_config has no fx100.config",
            "the plugin does not know its volume",
            "set it to the path of the volume's YAML",
        )
    file = Path(path).expanduser().absolute()
    return file, settings.load(file)


def _shard(config: Any, ours: Config, metadata: Any, host: Host) -> int:
    """Return the shard of this rank, in this replica of the engine."""
    base = config.get_extra_config_value("fx100.shard_base", ours.inprocess.shard_base)
    if isinstance(base, bool) or not isinstance(base, int) or base < 0:
        raise UnsupportedSetupError(
            f"fx100.shard_base is {base!r}",
            "rank r opens shard fx100.shard_base + r",
            "set it to a number from 0 on",
        )
    shard: int = base + host.data_parallel_rank * metadata.world_size + metadata.worker_id
    if shard >= ours.volume.shards:
        raise UnsupportedSetupError(
            f"rank {metadata.worker_id} needs shard {shard}, the volume has {ours.volume.shards}",
            "one is needed for every rank of every instance and replica",
            "set volume.shards and format the volume anew, or lower shard_base",
        )
    return shard


def _key_context(config: Any, metadata: Any, host: Host) -> KeyContext:
    return KeyContext(
        hash_algorithm=config.pre_caching_hash_algorithm,
        hash_seed=f"{root_hash() & (2**64 - 1):016x}",
        chunk_tokens=metadata.chunk_size,
        kv_shape=tuple(metadata.kv_shape),
        cache_dtype=host.cache_dtype or str(metadata.kv_dtype).removeprefix("torch."),
    )
