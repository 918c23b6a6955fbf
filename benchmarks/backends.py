"""The contenders, each opened as LMCache opens it: from the JSON of ``--l2-adapter``.

Every setting that differs from a default is here, and goes into the result of a run.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.l1 import Arena

MODEL = "benchmark/model"
RAW_BLOCK_META_BYTES = 16 << 20


@dataclass(frozen=True)
class Sizing:
    """What a contender must hold.

    Attributes
    ----------
    devices : tuple of str
        Block devices to use instead of files; empty for files.
    """

    chunk_bytes: int
    capacity_bytes: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """One contender.

    Attributes
    ----------
    window : int
        Chunks of one session that are asked for at a time; 0 for all, as LMCache does.
    spec : callable
        Makes the ``--l2-adapter`` JSON for a directory and a sizing.
    prepare : callable
        Formats or creates what the first opening needs.
    needs : str
        Module that must be importable.
    settle_s : float
        Idle time that it needs between a store and a kill, or it keeps nothing of it.
    """

    name: str
    spec: Callable[[Path, Sizing], dict[str, Any]]
    prepare: Callable[[Path, Sizing], None]
    window: int = 0
    needs: str = ""
    settle_s: float = 0.0

    def missing(self) -> str:
        """Say what is not installed; empty if nothing."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.name}: the module {self.needs} is not installed"
        return ""


def _ours(members: int, **sections: Any) -> dict[str, Any]:
    def config_path(home: Path) -> Path:
        return home / "fx100.yaml"

    def prepare(home: Path, sizing: Sizing) -> None:
        from fx100_lmcache import config as settings
        from fx100_lmcache.volume.format import format_members, plan_format

        share = (sizing.capacity_bytes // members * 21 // 20 + (2 << 20)) // 4096 * 4096
        if sizing.devices:
            listed: list[dict[str, Any]] = [{"path": d} for d in sizing.devices[:members]]
        else:
            listed = [
                {"path": str(home / f"member-{n}"), "size": f"{share // 1024}KiB"}
                for n in range(members)
            ]
        whole = {
            "volume": {"members": listed, "object": sizing.chunk_bytes},
            "identity": {"model_tags": {MODEL: "benchmark"}},
            **sections,
        }
        config_path(home).write_text(yaml.safe_dump(whole))
        loaded = settings.load(config_path(home))
        for member in format_members(loaded, plan_format(loaded), force=True).members:
            member.close()

    def spec(home: Path, _: Sizing) -> dict[str, Any]:
        return {
            "type": "plugin",
            "module_path": "fx100_lmcache.lmcache.l2_adapter",
            "class_name": "FX100L2Adapter",
            "adapter_params": {"config": str(config_path(home))},
        }

    return {"spec": spec, "prepare": prepare}


def _files(**options: Any) -> dict[str, Any]:
    def spec(home: Path, sizing: Sizing) -> dict[str, Any]:
        extra = dict(options)
        if options["type"] == "fs_native":
            extra["max_capacity_gb"] = sizing.capacity_bytes / (1 << 30)
        return {**extra, "base_path": str(home / "files"), "use_odirect": True}

    def prepare(home: Path, _: Sizing) -> None:
        (home / "files").mkdir(parents=True)

    return {"spec": spec, "prepare": prepare}


def _raw_block(io_engine: str, load_workers: int) -> dict[str, Any]:
    def spec(home: Path, sizing: Sizing) -> dict[str, Any]:
        return {
            "type": "raw_block",
            "device_path": sizing.devices[0] if sizing.devices else str(home / "device"),
            "slot_bytes": _slot_bytes(sizing),
            "capacity_bytes": sizing.capacity_bytes + RAW_BLOCK_META_BYTES,
            "meta_total_bytes": RAW_BLOCK_META_BYTES,
            # the default of 60 s would lose everything at a kill soon after storing
            "meta_checkpoint_interval_sec": 1,
            "use_odirect": True,
            "io_engine": io_engine,
            "num_load_workers": load_workers,
        }

    def prepare(home: Path, sizing: Sizing) -> None:
        if sizing.devices:
            with Path(sizing.devices[0]).open("r+b") as device:
                device.write(bytes(RAW_BLOCK_META_BYTES))
            return
        from fx100_lmcache.members.device import create_file

        create_file(home / "device", sizing.capacity_bytes + 2 * RAW_BLOCK_META_BYTES)

    # its index is written once a second, and only when it is idle
    needed = {"needs": "lmcache_rust_raw_block_io", "settle_s": 4.0}
    return {"spec": spec, "prepare": prepare, **needed}


def _slot_bytes(sizing: Sizing) -> int:
    return 4096 + -(-sizing.chunk_bytes // 4096) * 4096


_ONE_BY_ONE = {"io": {"reader_threads": 1, "writer_threads": 1}}

BACKENDS: dict[str, Backend] = {
    one.name: one
    for one in (
        Backend("ours", **_ours(4)),
        Backend("ours-width1", **_ours(4, stripe={"width": 1})),
        Backend("ours-one-by-one", **_ours(1, **_ONE_BY_ONE), window=1),
        Backend("ours-4-members-one-by-one", **_ours(4, **_ONE_BY_ONE), window=1),
        Backend("fs_native-4", **_files(type="fs_native", num_workers=4)),
        Backend("fs_native-32", **_files(type="fs_native", num_workers=32)),
        Backend("fs", **_files(type="fs")),
        Backend("raw_block-posix", **_raw_block("posix", 4)),
        Backend("raw_block-io_uring", **_raw_block("io_uring", 4)),
    )
}
"""Contenders by name. ``ours-one-by-one`` is the published baseline: one member, one chunk at a
time, one call in flight."""


def prepare_to_open(spec: dict[str, Any]) -> Callable[[Arena], Any]:
    """Import what an adapter needs; return what opens it, as ``lmcache server`` does."""
    import argparse

    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import (
        parse_args_to_l2_adapters_config,
    )

    if "module_path" in spec:
        importlib.import_module(spec["module_path"])
    parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))

    def opened(arena: Arena) -> Any:
        return create_l2_adapter(parsed.adapters[0], arena.describe())

    return opened
