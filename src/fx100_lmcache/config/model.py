"""The sections of the configuration file, and their rules across fields.

In the file, ``${NAME}`` in a text value stands for a variable of the environment; one that is not
set, or empty, is an error (see :mod:`fx100_lmcache.config.variables`).
"""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from fx100_lmcache.config.errors import reject
from fx100_lmcache.config.nvme import Address, NvmeConfig, NvmeNamespace
from fx100_lmcache.config.section import Section
from fx100_lmcache.config.values import (
    LOGICAL_BLOCK_BYTES,
    PATH_FIELD,
    SEQUENCE_FIELD,
    count_field,
    count_or_word_field,
    duration_field,
    format_size,
    fraction_field,
    size_field,
)
from fx100_lmcache.ondisk.geometry import MAX_MEMBERS, MAX_SHARDS

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


class MemberConfig(Section):
    """One stripe member: a file or block device by `path`, or a namespace by `nvme`."""

    path: Annotated[Path, PATH_FIELD] | None = Field(
        default=None,
        description="File or block device: relative to the YAML file or absolute; ~ is the home "
        "directory, links are kept as written.",
    )
    nvme: NvmeNamespace | None = Field(
        default=None, description="NVMe namespace, resolved to its device node at every open."
    )
    size_bytes: (
        Annotated[int, size_field(MIB, 1024 * TIB, multiple_of=LOGICAL_BLOCK_BYTES)] | None
    ) = Field(
        default=None,
        validation_alias="size",
        description="Bytes of a file that `fx100 format` creates; leave out for what exists.",
    )

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if (self.path is None) == (self.nvme is None):
            reject("needs exactly one of path and nvme")
        if self.nvme is not None and self.size_bytes is not None:
            reject("is for files only: a namespace has its size", ("size",), self.size_bytes)
        return self

    def names(self) -> frozenset[tuple[str, str]]:
        """Return every name that alone identifies the member, as (kind, value) pairs."""
        if self.nvme is not None:
            return self.nvme.names()
        return frozenset({("path", os.path.realpath(self.path or ""))})


class VolumeConfig(Section):
    """What `fx100 format` lays out. Later opens find the members and read the rest from them."""

    members: Annotated[tuple[MemberConfig, ...], SEQUENCE_FIELD] = Field(
        description="1 to 16 stripe members, in any order: a member is known by its label."
    )
    shards: Annotated[int, count_field(1, MAX_SHARDS)] = Field(
        default=1,
        description="Independently owned shares of every member. 1 for `lmcache server`; one per "
        "rank in-process.",
    )
    object_bytes: Annotated[int, size_field(LOGICAL_BLOCK_BYTES, GIB)] = Field(
        default=8_126_464,
        validation_alias="object",
        description="Bytes of a full chunk, from which the frame size follows. The default is 256 "
        "tokens of Qwen3-Coder-480B in bf16 on one rank of eight.",
    )
    inode_bytes: Annotated[int, size_field(512, 8192, power_of_two=True)] = Field(
        default=KIB,
        validation_alias="inode",
        description="Bytes of an inode; 1KiB names 32 pieces and leaves room for metadata.",
    )
    bytes_per_inode: Annotated[int, size_field(LOGICAL_BLOCK_BYTES, GIB)] | None = Field(
        default=None,
        description="One inode, so at most one object, per so many bytes of a member. Default: "
        "object / 64, but at most 256KiB, and at least 64 inodes' size. That is 124KiB for the "
        "default object and costs 0.8 % of the volume (64KiB: 1.6 %, 32KiB: 3.1 %); all inodes "
        "are read when the volume is opened. Objects of this mean size or more use all the "
        "space; with smaller ones inodes run out first, and `fx100 status` says so.",
    )

    @model_validator(mode="after")
    def _members_are_distinct(self) -> Self:
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            reject(f"must be a list of 1 to {MAX_MEMBERS} members", ("members",))
        seen: dict[tuple[str, str], int] = {}
        for position, member in enumerate(self.members):
            for kind, value in sorted(member.names()):
                first = seen.setdefault((kind, value), position)
                if first != position:
                    at = ("members", position, *(("path",) if member.path else ("nvme", kind)))
                    reject(f"is the same as volume.members[{first}]", at, value)
        return self


class StripeConfig(Section):
    """How the pieces of one object are spread."""

    width: Annotated[int | Literal["all"], count_or_word_field(1, MAX_MEMBERS, "all")] = Field(
        default="all",
        description="Members that share one object: all of them (RAID0) or a number. 1 puts an "
        "object on one member, so that a lost member costs only its own objects.",
    )


class IoConfig(Section):
    """Threads, sizes and limits of the I/O engine."""

    reader_threads: Annotated[int, count_field(1, 64)] = Field(
        default=16,
        description="Reading threads per member. 16, because in a busy Python process 4 fall to a "
        "quarter of their bandwidth while they wait for the GIL.",
    )
    writer_threads: Annotated[int, count_field(1, 64)] = Field(
        default=4,
        description="Writing threads per member, no more than reader_threads: reads come first.",
    )
    read_in_flight_bytes: Annotated[int, size_field(128 * KIB, GIB)] = Field(
        default=8 * MIB,
        validation_alias="read_in_flight",
        description="Bytes of each member's reads in flight, per process (native engine; the "
        "Python one has reader_threads alone). The bandwidth of one member times the latency of "
        "a read is enough (3 GB/s x 1 ms = 3 MB); more makes the first session wait for the last.",
    )
    max_io_bytes: Annotated[
        int, size_field(128 * KIB, 16 * MIB, multiple_of=LOGICAL_BLOCK_BYTES)
    ] = Field(
        default=2 * MIB,
        validation_alias="max_io",
        description="Bytes of the largest single read or write. Some NVMe/TCP targets fail on "
        "more than 1MiB; then smaller ones are tried, and used from there on.",
    )
    max_write_bytes: Annotated[int, size_field(MIB, TIB)] = Field(
        default=8 * GIB,
        validation_alias="max_write_in_flight",
        description="Bytes of puts accepted and not yet written; past it a put is dropped and "
        "counted. 8GiB holds one session of 29,800 tokens of a 480B model.",
    )
    engine: Literal["auto", "native", "python"] = Field(
        default="auto",
        description="auto takes the native one where it can be used; native insists on it.",
    )
    direct: Literal["require", "prefer", "off"] = Field(
        default="prefer",
        description="Direct I/O: refuse to open without it, use it where it works and report it, "
        "or do not use it.",
    )

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if self.writer_threads > self.reader_threads:
            reject(
                f"must be at most reader_threads, which is {self.reader_threads}",
                ("writer_threads",),
                self.writer_threads,
            )
        return self


class DeadlineConfig(Section):
    """How long anything may take. Lookups have no deadline: they never touch a device."""

    start_s: Annotated[float, duration_field(0, 600)] = Field(
        default=0.0,
        validation_alias="start",
        description="Seconds that a server or worker waits at its start for members that are not "
        "there yet, connecting them meanwhile (`nvme.reconnect`); then it fails as without. vLLM "
        "gives its workers 600 s to get ready.",
    )
    load_s: Annotated[float, duration_field(0.01, 300)] = Field(
        default=10.0,
        validation_alias="load",
        description="Seconds for a load; what is not there by then is a miss.",
    )
    store_s: Annotated[float, duration_field(0.01, 60)] = Field(
        default=60.0,
        validation_alias="store",
        description="Seconds for a put, at most 60: LMCache may reuse the source buffer when its "
        "read lock of 300 s ends, and a later hash would bless wrong bytes.",
    )
    close_s: Annotated[float, duration_field(0.01, 10)] = Field(
        default=8.0,
        validation_alias="close",
        description="Seconds for close, at most 10: LMCache gives its whole engine 15 s.",
    )
    pin_ttl_s: Annotated[float, duration_field(1, 3600)] = Field(
        default=300.0,
        validation_alias="pin_ttl",
        description="Seconds until a pin that nobody released ends; 300 as in LMCache.",
    )
    claim_check_s: Annotated[float, duration_field(0.01, 60)] = Field(
        default=1.0,
        validation_alias="claim_check",
        description="Seconds after which a writer looks again whether the shard is still its own.",
    )
    probe_interval_s: Annotated[float, duration_field(0.01, 60)] = Field(
        default=1.0,
        validation_alias="probe_interval",
        description="Seconds between two looks for a member that is down.",
    )
    stuck_io_s: Annotated[float, duration_field(0.01, 599)] = Field(
        default=300.0,
        validation_alias="stuck_io",
        description="Seconds after which an I/O in the kernel is called stuck and escalated; "
        "under the 600 s of LMCache's write lock.",
    )

    @model_validator(mode="after")
    def _stuck_comes_last(self) -> Self:
        longest = max(self.load_s, self.store_s)
        if self.stuck_io_s < longest:
            allowed = f"must be at least load and store, here {longest:g}s"
            reject(allowed, ("stuck_io",), self.stuck_io_s)
        return self


class ClaimConfig(Section):
    """How the owner of a shard shows that it lives, to servers on other hosts."""

    heartbeat_s: Annotated[float, duration_field(0.1, 60)] = Field(
        default=3.0,
        validation_alias="heartbeat",
        description="Seconds between two renewals of a claim: a write of 4 KiB for each shard and "
        "member.",
    )
    watch_s: Annotated[float, duration_field(5, 600)] = Field(
        default=15.0,
        validation_alias="watch",
        description="Seconds that another host's claim must stand still before it is replaced. "
        "The owner stops storing when it could not renew for 0.6 of this.",
    )

    @model_validator(mode="after")
    def _beats_fit(self) -> Self:
        if self.watch_s < 5 * self.heartbeat_s:
            allowed = f"must be at least 5 heartbeats, here {5 * self.heartbeat_s:g}s"
            reject(allowed, ("watch",), self.watch_s)
        return self


class SpaceConfig(Section):
    """How much room is kept free by evicting ahead of need."""

    reserve_fraction: Annotated[float, fraction_field(0, 0.5)] = Field(
        default=0.03,
        description="Share of a shard kept free, 0 to 0.5. With 0.03 reads stay as large as on a "
        "fresh volume; with 0 they shrink by a quarter.",
    )
    evict_batch_fraction: Annotated[float, fraction_field(0.0001, 0.25)] = Field(
        default=0.01,
        description="Share of a shard that our own eviction frees at once, by 64 entries at most.",
    )
    trigger_watermark: Annotated[float, fraction_field(0.1, 0.99)] = Field(
        default=0.9,
        description="Used share at which LMCache's evictor starts (multiprocess mode). Below 1 - "
        "reserve_fraction, so that LMCache, which knows what is in use, chooses before we must.",
    )
    eviction_ratio: Annotated[float, fraction_field(0.001, 0.5)] = Field(
        default=0.05,
        description="Share of the keys that LMCache's evictor drops in one pass, one per second.",
    )

    @model_validator(mode="after")
    def _lmcache_evicts_first(self) -> Self:
        limit = 1 - self.reserve_fraction
        if self.trigger_watermark > limit:
            allowed = f"must be at most 1 - reserve_fraction, here {limit:g}"
            reject(allowed, ("trigger_watermark",), self.trigger_watermark)
        return self


class IdentityConfig(Section):
    """What tells apart caches that LMCache's keys do not: revision, quantisation, layout."""

    model_tags: dict[str, str] = Field(
        default={},
        validation_alias=AliasChoices("model_tags", "namespaces"),
        description="Model name as vLLM knows it -> any tag, such as a revision. Change the tag "
        "when the same name means other weights.",
    )
    default_model_tag: str = Field(
        default="",
        validation_alias=AliasChoices("default_model_tag", "default_namespace"),
        description="Tag of models not listed.",
    )
    require_model_tag: bool = Field(
        default=False,
        validation_alias=AliasChoices("require_model_tag", "require_namespace"),
        description="Cache nothing for models that are not listed, instead of warning.",
    )

    def tag_of(self, model_name: str) -> str | None:
        """Return the tag of a model, or None when it must not be cached."""
        if self.require_model_tag:
            return self.model_tags.get(model_name)
        return self.model_tags.get(model_name, self.default_model_tag)


class InProcessConfig(Section):
    """For LMCache inside the vLLM workers; `lmcache server` opens all shards and ignores it."""

    shard_base: Annotated[int, count_field(0, MAX_SHARDS - 1)] = Field(
        default=0, description="Shard of this instance's rank 0; rank r opens shard_base + r."
    )
    admission: Literal["all", "second_touch"] = Field(
        default="all",
        description="Store every chunk, or only what is offered a second time, so that one-shot "
        "prompts are never written.",
    )


class MetricsConfig(Section):
    """Prometheus metrics."""

    enabled: bool = Field(default=True, description="Count at all; costs next to nothing.")
    port: Annotated[int, count_field(1, 65535)] | None = Field(
        default=None, description="HTTP port of our own; default: none, use the host's registry."
    )
    host: Address = Field(
        default="127.0.0.1", description="Address to listen on; loopback, as nothing asks who."
    )


class Config(Section):
    """The whole file."""

    volume: VolumeConfig = Field(description="Members and layout.")
    stripe: StripeConfig = Field(default=StripeConfig(), description="Spreading of an object.")
    io: IoConfig = Field(default=IoConfig(), description="Threads, sizes and limits.")
    deadlines: DeadlineConfig = Field(default=DeadlineConfig(), description="Time limits.")
    claim: ClaimConfig = Field(default=ClaimConfig(), description="Who owns a shard.")
    space: SpaceConfig = Field(default=SpaceConfig(), description="Free space and eviction.")
    identity: IdentityConfig = Field(default=IdentityConfig(), description="Tags of models.")
    inprocess: InProcessConfig = Field(
        default=InProcessConfig(), description="Settings of the in-process mode."
    )
    nvme: NvmeConfig | None = Field(
        default=None, description="Subsystems to connect; leave out for local devices."
    )
    metrics: MetricsConfig = Field(default=MetricsConfig(), description="Prometheus metrics.")

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        width, members = self.stripe.width, len(self.volume.members)
        if width != "all" and width > members:
            reject(f"must be at most the number of members, {members}", ("stripe", "width"), width)
        base, shards = self.inprocess.shard_base, self.volume.shards
        if base >= shards:
            reject(f"must be below volume.shards, {shards}", ("inprocess", "shard_base"), base)
        # A put larger than the bound would be dropped every time, and nothing would be cached.
        if self.io.max_write_bytes < self.volume.object_bytes:
            reject(
                f"must be at least volume.object, {format_size(self.volume.object_bytes)}",
                ("io", "max_write_in_flight"),
                format_size(self.io.max_write_bytes),
            )
        return self


def subsystems_named(config: Config) -> frozenset[str]:
    """Return the NQNs of the subsystems that a configuration connects or takes members from."""
    connected = config.nvme.subsystems if config.nvme else ()
    members = (member.nvme for member in config.volume.members)
    return frozenset(
        {each.subsystem_nqn for each in connected}
        | {each.subsystem_nqn for each in members if each and each.subsystem_nqn}
    )
