"""The configuration of a volume: one YAML file, checked in full before anything is opened.

`load` reads a file and returns a frozen `Config`; every failure is a `ConfigError` that names
the file, the place in it, the value found and what is allowed. Code may also build the models
directly, for example `Config(volume=VolumeConfig(members=(MemberConfig(path=...),)))`.

In YAML a value carries its unit (``max_io: 1MiB``, ``load: 500ms``); in Python the name does
(`IoConfig.max_io_bytes`, `DeadlineConfig.load_s`). In YAML ``${NAME}`` stands for a variable of the
environment.
"""

from fx100_lmcache.config.errors import ConfigError, Problem
from fx100_lmcache.config.loader import load, parse
from fx100_lmcache.config.model import (
    Config,
    DeadlineConfig,
    IdentityConfig,
    InProcessConfig,
    IoConfig,
    MemberConfig,
    MetricsConfig,
    SpaceConfig,
    StripeConfig,
    VolumeConfig,
    subsystems_named,
)
from fx100_lmcache.config.nvme import (
    NvmeAddress,
    NvmeConfig,
    NvmeNamespace,
    NvmeSubsystem,
)
from fx100_lmcache.config.values import format_size, parse_duration, parse_size

__all__ = [
    "Config",
    "ConfigError",
    "DeadlineConfig",
    "IdentityConfig",
    "InProcessConfig",
    "IoConfig",
    "MemberConfig",
    "MetricsConfig",
    "NvmeAddress",
    "NvmeConfig",
    "NvmeNamespace",
    "NvmeSubsystem",
    "Problem",
    "SpaceConfig",
    "StripeConfig",
    "VolumeConfig",
    "format_size",
    "load",
    "parse",
    "parse_duration",
    "parse_size",
    "subsystems_named",
]
