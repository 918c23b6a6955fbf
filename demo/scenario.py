"""The order of events: a session, SIGKILL, and its next turn without and with the store."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from demo import store
from demo.commands import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    CPU_KV_CACHE_GIB,
    L1_GIB,
    MAX_SEQUENCES,
    Device,
    Ports,
    lmcache_command,
    server_environment,
    vllm_arguments,
    vllm_command,
)
from demo.measure import Completion, ServerCounts, complete, server_counts
from demo.model import make_tiny_model
from demo.report import Result
from demo.services import POLL_INTERVAL_S, Services
from demo.session import ANSWER_TOKENS, Session, warm_up_prompt
from fx100_lmcache.accept.processes import SHARED_MEMORY

MODEL = "tiny-qwen3"
LMCACHE_LOG = "lmcache.log"
STORE_TIMEOUT_S = 120.0
COUNT_TIMEOUT_S = 10.0

Step = Callable[[str], AbstractContextManager[None]]
"""Shows what is being done, for as long as the block lasts."""


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes
    ----------
    directory : Path
        Absolute; where everything goes.
    sockets : Path
        A directory with a short name, for Unix sockets.
    session_tokens : int
        Length of the last prompt before the kill.
    ports : Ports
        Where the servers listen.
    device : Device
        What vLLM runs on.
    adapter_json : str or None
        Another L2 adapter to show instead of ours, for comparison.
    l1_gib : int
        Memory of `lmcache server` for chunks, in GiB.
    max_sequences : int
        Requests that vLLM serves at once.
    """

    directory: Path
    sockets: Path
    session_tokens: int
    ports: Ports
    device: Device
    adapter_json: str | None
    l1_gib: int = L1_GIB
    max_sequences: int = MAX_SEQUENCES


def check_shared_memory(device: Device) -> None:
    """Raise `RuntimeError` when /dev/shm is too small for the KV cache of vLLM on a CPU."""
    if device == "gpu":
        return
    needed_bytes = (CPU_KV_CACHE_GIB << 30) + (512 << 20)
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    if free_bytes < needed_bytes:
        raise RuntimeError(
            f"{SHARED_MEMORY} has {free_bytes >> 20} MiB free; vLLM on a CPU needs "
            f"{needed_bytes >> 20} MiB there for its KV cache and queues. In a container: "
            "start it with --shm-size=4g"
        )


def run(options: Options, services: Services, step: Step) -> Result:
    """Run the whole demo and return what was measured.

    Raises
    ------
    RuntimeError
        When a server, the store or a request fails; the message says which and why.
    """
    with step("making a tiny model"):
        make_tiny_model(options.directory / MODEL, CONTEXT_TOKENS)
    config, adapters, store_name = _prepare_store(options, step)

    session = Session(options.session_tokens)
    start_servers(options, services, step, adapters, "with the store", warm_up=1, config=config)
    turns = [_turn(options, services, step, session, prompt) for prompt in session.prompts()]
    expected_chunks = options.session_tokens // CHUNK_TOKENS
    stored_chunks = wait_until_stored(options, services, step, expected_chunks)
    kill_servers(services, step)

    prompt = session.next_prompt()
    start_servers(options, services, step, [], "without a store", warm_up=2)
    with step(f"next turn, {len(prompt):,} tokens, computed"):
        computed = complete(options.ports.vllm_url, MODEL, prompt, ANSWER_TOKENS)
    kill_servers(services, step)

    start_servers(options, services, step, adapters, "with the store", warm_up=3, config=config)
    before = server_counts(options.ports.lmcache_url)
    with step(f"next turn, {len(prompt):,} tokens, from the store"):
        served = complete(options.ports.vllm_url, MODEL, prompt, ANSWER_TOKENS)
    after = wait_until_counted(options, before.hit_tokens + served.cached_tokens)
    kill_servers(services, step)

    return Result(
        device=options.device,
        store_name=store_name,
        session_tokens=options.session_tokens,
        prompt_tokens=served.prompt_tokens,
        session_ttft_s=tuple(turn.ttft_s for turn in turns),
        stored_chunks=stored_chunks,
        computed_ttft_s=computed.ttft_s,
        store_ttft_s=served.ttft_s,
        served_tokens=after.hit_tokens - before.hit_tokens,
        cached_tokens=served.cached_tokens,
        read_bytes=_difference(after.read_bytes, before.read_bytes),
        identical=served.output_tokens == computed.output_tokens,
    )


def _prepare_store(options: Options, step: Step) -> tuple[Path | None, list[str], str]:
    """Format the embedded volume; return its YAML, or a given adapter, and a name for the table."""
    if options.adapter_json is not None:
        return None, [options.adapter_json], "the given adapter"
    with step(f"formatting the volume: {store.MEMBERS} files of {store.MEMBER_SIZE}"):
        config = store.write_config(options.directory, MODEL)
        store.format_volume(config)
        return config, [], "fx100"


def start_servers(
    options: Options,
    services: Services,
    step: Step,
    adapters: Sequence[str],
    which: str,
    warm_up: int,
    *,
    config: Path | None = None,
) -> None:
    """Start `lmcache server` and vLLM and send a prompt of no interest.

    Parameters
    ----------
    adapters : sequence of str
        JSON of L2 adapters; the server stores to all of them.
    config : Path or None
        YAML of our store, if it is to be one of them.
    which : str
        Says for the user what this start is.
    warm_up : int
        Number of the prompt; another one for each start, so that no store has it.
    """
    directory, ports = options.directory, options.ports
    environment = server_environment(os.environ, directory, options.sockets, options.device)
    with step(f"starting lmcache server {which}"):
        lmcache = services.start(
            "lmcache server",
            lmcache_command(ports, options.device, config, adapters, l1_gib=options.l1_gib),
            environment,
            directory,
            directory / LMCACHE_LOG,
        )
        lmcache.wait_ready(f"{ports.lmcache_url}/healthcheck")
    with step(f"starting vLLM on the {options.device.upper()}"):
        arguments = vllm_arguments(ports, MODEL, options.device, options.max_sequences)
        vllm = services.start(
            "vLLM",
            vllm_command(arguments, options.device, directory),
            environment,
            directory,
            directory / "vllm.log",
        )
        vllm.wait_ready(f"{ports.vllm_url}/health")
    with step("warming up"):
        complete(ports.vllm_url, MODEL, warm_up_prompt(warm_up), ANSWER_TOKENS)


def _turn(
    options: Options, services: Services, step: Step, session: Session, prompt: list[int]
) -> Completion:
    """Send one turn of the session and take the answer into the history."""
    with step(f"session: a turn of {len(prompt):,} tokens"):
        turn = complete(options.ports.vllm_url, MODEL, prompt, ANSWER_TOKENS)
    services.check_alive()
    session.add_answer(turn.output_tokens)
    return turn


def wait_until_stored(
    options: Options, services: Services, step: Step, expected_chunks: int
) -> int:
    """Return how many chunks the store acknowledged, once it holds as many as expected.

    Chunks that came out of the store count as well: a given adapter may hold them from before.

    Raises
    ------
    RuntimeError
        When it does not within `STORE_TIMEOUT_S`.
    """
    deadline = time.monotonic() + STORE_TIMEOUT_S
    with step(f"waiting until {expected_chunks} chunks are in the store"):
        while True:
            services.check_alive()
            counts = server_counts(options.ports.lmcache_url)
            held_chunks = counts.stored_chunks + counts.hit_tokens // CHUNK_TOKENS
            if held_chunks >= expected_chunks and not counts.pending_stores:
                return counts.stored_chunks
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"after {STORE_TIMEOUT_S:.0f} s the store holds {held_chunks} of "
                    f"{expected_chunks} chunks; see {options.directory / LMCACHE_LOG}"
                )
            time.sleep(POLL_INTERVAL_S)


def wait_until_counted(options: Options, hit_tokens: int) -> ServerCounts:
    """Return the counts of `lmcache server`, which follow the answer with a short delay."""
    deadline = time.monotonic() + COUNT_TIMEOUT_S
    while True:
        counts = server_counts(options.ports.lmcache_url)
        if counts.hit_tokens >= hit_tokens or time.monotonic() > deadline:
            return counts
        time.sleep(POLL_INTERVAL_S)


def kill_servers(services: Services, step: Step) -> None:
    """Kill both servers with SIGKILL, and say so."""
    with step("SIGKILL to vLLM and lmcache server"):
        services.kill_all()


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
