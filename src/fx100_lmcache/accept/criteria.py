"""What the gates measure and what they ask for: one YAML file, checked in full.

The defaults are what an array of four members on 100 Gbit/s Ethernet is held to; both sides agree
on the file before the first gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from fx100_lmcache.config.errors import ConfigError, Problem, problems_of
from fx100_lmcache.config.section import Section
from fx100_lmcache.config.values import (
    SEQUENCE_FIELD,
    count_field,
    duration_field,
    fraction_field,
    size_field,
)

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_FILE_BYTES = 1 << 20

_Size = Annotated[int, size_field(4 * KIB, TIB)]
_BlockSize = Annotated[int, size_field(4 * KIB, 64 * MIB)]
_Seconds = Annotated[float, duration_field(0.1, 3600)]
_Ratio = Annotated[float, fraction_field(0, 100)]
_Count = Annotated[int, count_field(1, 4096)]
_Depths = Annotated[tuple[Annotated[int, count_field(1, 1024)], ...], SEQUENCE_FIELD]
_Words = Annotated[tuple[str, ...], SEQUENCE_FIELD]


def _hours(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1000:
        raise ValueError("must be a number of hours, greater than 0, at most 1000")
    return float(value)


class FioCriteria(Section):
    """Which cells fio measures.

    Attributes
    ----------
    region_bytes : int
        Of each member, from the start of its data on; scratch files have this size, too.
    """

    engine: Literal["io_uring", "libaio"] = "io_uring"
    block_bytes: Annotated[tuple[_BlockSize, ...], SEQUENCE_FIELD] = Field(
        default=(128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB),
        validation_alias="block_sizes",
    )
    depths: _Depths = (1, 2, 4, 8, 16, 32, 64, 128)
    patterns: Annotated[tuple[Literal["sequential", "random"], ...], SEQUENCE_FIELD] = (
        "sequential",
        "random",
    )
    cell_s: _Seconds = Field(default=5.0, validation_alias="seconds")
    region_bytes: _Size = Field(default=16 * GIB, validation_alias="region")


class G1Criteria(Section):
    """G1, arrival.

    Attributes
    ----------
    member_spread : float
        How far the slowest member may stay behind the median of all, as a share of it.
    min_gb_per_s : float or None
        Best bandwidth of reads from all members together; None is not judged.
    max_p99_ms : float
        Of reads of the smallest block at the smallest depth.
    firmware : str or None
        Firmware revision that every controller must have; None asks for one and the same.
    min_paths, mtu_bytes, port_mbit_per_s : int or None
        Live paths of each subsystem; what the network interface towards each has. None is not
        judged.
    path_back_s : float
        From the path's return to the first good read over it.
    """

    fio: FioCriteria = FioCriteria()
    member_spread: Annotated[float, fraction_field(0, 1)] = 0.1
    min_gb_per_s: Annotated[float, fraction_field(0, 1000)] | None = 9.0
    max_p99_ms: Annotated[float, fraction_field(0, 60_000)] = 5.0
    firmware: str | None = None
    min_paths: Annotated[int, count_field(1, 64)] | None = 2
    mtu_bytes: Annotated[int, count_field(576, 65_536)] | None = 9000
    port_mbit_per_s: Annotated[int, count_field(1, 10_000_000)] | None = 100_000
    max_percent_used: Annotated[int, count_field(0, 255)] = 10
    path_back_s: _Seconds = Field(default=30.0, validation_alias="path_back")


class G2Criteria(Section):
    """G2, one node.

    Attributes
    ----------
    mode : str
        Of LMCache, as in ``fx100 doctor --mode``.
    session_bytes : int
        KV of one session on this node, all ranks.
    window_bytes : int
        Memory that a session is loaded into, piece by piece; each concurrent session has its own.
    runs : int
        Of each measurement, alternating with fio where both are compared.
    engine_to_fio : float
        Our bandwidth at the highest concurrency over fio's on the same bytes, at least.
    parallel_to_sequential : float
        The same over one member read one chunk at a time, at least.
    fairness : float
        p95 over p50 of the sessions' load times at the highest concurrency, at most.
    """

    mode: Literal["mp", "in-process", "both"] = "mp"
    session_bytes: _Size = Field(default=7 * GIB, validation_alias="session")
    window_bytes: _Size = Field(default=GIB, validation_alias="window")
    concurrency: _Depths = (1, 2, 4, 8, 16)
    runs: _Count = 3
    fio_depths: _Depths = (4, 16, 32, 64, 128)
    engine_to_fio: _Ratio = 0.85
    parallel_to_sequential: _Ratio = 2.5
    fairness: _Ratio = 3.0
    max_recovery_s: _Seconds = Field(default=10.0, validation_alias="recovery")


class G3Criteria(Section):
    """G3, the main gate: returning sessions through the inference server.

    The protocol is that of github.com/mingxin-tech/mingxin-kvcache-bench: 34 sessions of 118 chunks
    of 256 tokens, 8, 16 and 32 at once, each read once.

    Attributes
    ----------
    server, inference, generator : tuple of str
        Command lines. In each word ``{store}`` is the configuration or ``none``, and for the
        generator ``{prompts}`` the file of prompts, ``{concurrency}`` how many come at once,
        ``{count}`` how many there are, ``{answer}`` tokens to generate, ``{result}`` the file to
        write. ``{python}`` is this Python.
    server_url, inference_url : str
        Answers with success when ready.
    baseline : str
        What stands for ``{store}`` in the runs without the store: ``none`` computes again; the YAML
        of a volume on local NVMe is what the published figures compare with.
    session_words : int
        Short English words of a session, most of them one token.
    settle_s : float
        From the last answer to the kill: LMCache stores behind the answers.
    identical_share : float
        Share of answers that must be the same in both arms, at greedy decoding.
    ttft_gain : float
        Share by which TTFT p50 with the store is below that without, at least.
    throughput_gain : float
        Share by which output tokens per second are above those without, at least.
    goodput_s : float
        A request counts for the goodput if its first token came within this.
    """

    server: _Words = ("bash", "configs/lmcache-server.sh", "gpu", "{store}")
    server_url: str = "http://127.0.0.1:8180/healthcheck"
    inference: _Words = ("vllm", "serve", "MODEL", "--config", "configs/vllm-mp.yaml")
    inference_url: str = "http://127.0.0.1:8000/health"
    generator: _Words = (
        *("vllm", "bench", "serve", "--backend", "openai", "--base-url", "http://127.0.0.1:8000"),
        *("--model", "MODEL", "--dataset-name", "custom", "--dataset-path", "{prompts}"),
        *("--custom-output-len", "{answer}", "--num-prompts", "{count}"),
        *("--max-concurrency", "{concurrency}", "--disable-shuffle", "--temperature", "0"),
        *("--ignore-eos", "--skip-chat-template", "--ready-check-timeout-sec", "0"),
        *("--save-result", "--save-detailed", "--result-filename", "{result}"),
    )
    environment: dict[str, str] = Field(default_factory=dict)
    baseline: str = "none"
    sessions: _Count = 34
    session_words: Annotated[int, count_field(16, 1_000_000)] = 30_208
    answer_tokens: _Count = 128
    concurrency: _Depths = (8, 16, 32)
    rounds: _Count = 1
    start_s: _Seconds = Field(default=1200.0, validation_alias="start")
    settle_s: _Seconds = Field(default=20.0, validation_alias="settle")
    generator_s: _Seconds = Field(default=3600.0, validation_alias="generator_limit")
    ttft_gain: Annotated[float, fraction_field(-10, 1)] = 0.25
    throughput_gain: Annotated[float, fraction_field(-1, 100)] = 0.29
    identical_share: Annotated[float, fraction_field(0, 1)] = 1.0
    goodput_s: _Seconds = Field(default=30.0, validation_alias="goodput")


class G4Criteria(Section):
    """G4, stability.

    Attributes
    ----------
    segment_s : float
        The load's process lives so long; then it is killed and what it had stored is looked for.
    objects : int
        Objects that the load keeps stored, of the volume's object size.
    memory_growth_bytes, descriptor_growth : int
        Between the second quarter of a segment and its last, at most.
    latency_growth : float
        p50 of loads in the last quarter over that of the second, at most.
    restart_s : float
        From the kill to the first load that is a hit, at most.
    """

    hours: Annotated[float, BeforeValidator(_hours)] = 72.0
    segment_s: Annotated[float, duration_field(1, 24 * 3600)] = Field(
        default=3600.0, validation_alias="segment"
    )
    objects: Annotated[int, count_field(4, 1_000_000)] = 2000
    threads: Annotated[int, count_field(1, 64)] = 8
    path_down_s: _Seconds = Field(default=60.0, validation_alias="path_down")
    path_back_s: _Seconds = Field(default=30.0, validation_alias="path_back")
    memory_growth_bytes: _Size = Field(default=64 * MIB, validation_alias="memory_growth")
    descriptor_growth: Annotated[int, count_field(0, 10_000)] = 8
    latency_growth: _Ratio = 1.5
    restart_s: _Seconds = Field(default=60.0, validation_alias="restart")


class Criteria(Section):
    """The whole file."""

    g1: G1Criteria = G1Criteria()
    g2: G2Criteria = G2Criteria()
    g3: G3Criteria = G3Criteria()
    g4: G4Criteria = G4Criteria()


def load_criteria(path: Path | None) -> Criteria:
    """Read and check a file of criteria; None gives the defaults.

    Raises
    ------
    ConfigError
        With the YAML path of each field that is wrong.
    """
    if path is None:
        return Criteria()
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(path, [Problem("", None, "is larger than 1MiB")])
        data = yaml.safe_load(raw)
    except OSError as error:
        raise ConfigError(path, [Problem("", None, f"cannot be read: {error.strerror}")]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(path, [Problem("", None, f"cannot be read as YAML: {error}")]) from error
    try:
        return Criteria.model_validate({} if data is None else data, by_alias=True, by_name=False)
    except ValidationError as error:
        found = [problem for _, problem in problems_of(error, Criteria)]
        raise ConfigError(path, found) from error
