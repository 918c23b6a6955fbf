"""One timed completion, and what `lmcache server` counted meanwhile."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

REQUEST_TIMEOUT_S = 600.0
STATUS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Completion:
    """What came back for one prompt.

    Attributes
    ----------
    ttft_s : float
        Seconds from sending the request to the first output token.
    output_tokens : tuple of int
        Token ids of the answer.
    prompt_tokens, cached_tokens : int
        Length of the prompt, and how much of it vLLM did not compute, by vLLM's own count.
    """

    ttft_s: float
    output_tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class ServerCounts:
    """What `lmcache server` reports about the tier below its memory (L2) since its start.

    Attributes
    ----------
    stored_chunks : int
        Chunks whose store task the adapter reported as successful.
    pending_stores : int
        Chunks waiting for the store, and store tasks not finished.
    hit_tokens : int
        Prompt tokens that came from the store and not from the server's memory.
    read_bytes : int or None
        Bytes read from the members, as our adapter counts them; None with other adapters.
    """

    stored_chunks: int
    pending_stores: int
    hit_tokens: int
    read_bytes: int | None


def complete(base_url: str, model: str, prompt: Sequence[int], answer_tokens: int) -> Completion:
    """Send a prompt, greedily decoded and streamed, and time the first token.

    Raises
    ------
    RuntimeError
        When vLLM refuses the request or sends no token.
    httpx.HTTPError
        When the connection fails.
    """
    request = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    started = time.perf_counter()
    first: float | None = None
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    with httpx.stream(
        "POST", f"{base_url}/v1/completions", json=request, timeout=REQUEST_TIMEOUT_S
    ) as response:
        if response.is_error:
            raise RuntimeError(f"vLLM refused a request: {response.read().decode()}")
        for event in server_sent_events(response.iter_bytes()):
            if "error" in event:
                raise RuntimeError(f"vLLM failed a request: {event['error']}")
            new = [token for choice in event["choices"] for token in choice.get("token_ids") or []]
            if new and first is None:
                first = time.perf_counter()
            tokens += new
            usage = event.get("usage") or usage
    if first is None:
        raise RuntimeError("vLLM sent no token")
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        ttft_s=first - started,
        output_tokens=tuple(tokens),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
    )


def server_sent_events(stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON events of a stream.

    Lines end with LF alone: the text of an answer may hold other line ends, which `iter_lines` of
    httpx would cut at.
    """
    rest = b""
    for received in stream:
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]" and line.startswith(b"data: "):
                yield json.loads(data)


def server_counts(base_url: str) -> ServerCounts:
    """Ask `lmcache server` for its counts.

    Raises
    ------
    httpx.HTTPError
        When it does not answer.
    """
    status = httpx.get(f"{base_url}/status", timeout=STATUS_TIMEOUT_S).raise_for_status()
    metrics = httpx.get(f"{base_url}/metrics", timeout=STATUS_TIMEOUT_S).raise_for_status()
    return parse_counts(status.json(), metrics.text)


def parse_counts(status: dict[str, Any], metrics: str) -> ServerCounts:
    """Pick the counts out of the answers of ``/status`` and ``/metrics``."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    manager = status["storage_manager"]
    own_counts = [adapter["counts"] for adapter in manager["l2_adapters"] if "counts" in adapter]
    controller = manager["store_controller"]
    return ServerCounts(
        stored_chunks=int(totals.get("lmcache_mp_l2_store_completed_objects_chunks_total", 0)),
        pending_stores=controller["pending_keys_count"] + controller["in_flight_task_count"],
        hit_tokens=int(totals.get("lmcache_mp_lookup_hit_l2_tokens_total", 0)),
        read_bytes=own_counts[0].get("read_bytes", 0) if own_counts else None,
    )
