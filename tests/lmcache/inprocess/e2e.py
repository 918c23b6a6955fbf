"""The in-process mode from end to end on a CPU: a session comes back after SIGKILL.

    python tests/lmcache/inprocess/e2e.py --mode sync --tp 2        (takes minutes)
    pytest tests/lmcache/inprocess/e2e.py                           (the same, checked)

A session of 29,800 tokens is served, vLLM is killed, and its next turn is served again: computed,
from a store in which one chunk of the first rank was damaged meanwhile, and from the store once
more, which must not hold anything that was computed on top of the damage, on any rank.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml

from demo.commands import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    Ports,
    server_environment,
    vllm_arguments,
    vllm_command,
)
from demo.measure import Completion, complete
from demo.model import KV_BYTES_PER_TOKEN, LAYERS, make_tiny_model
from demo.services import Services, free_ports
from demo.session import ANSWER_TOKENS, Session, warm_up_prompt
from demo.store import format_volume, write_config
from fx100_lmcache import config as settings
from fx100_lmcache.errors import ClaimError
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.ondisk.location import unpack_location
from support import TESTS

MODEL = "tiny-qwen3"
MODES = {
    "sync": {},
    "async": {"lmcache.enable_async_loading": True},
    "layerwise": {"lmcache.use_layerwise": True},
}
DAMAGED = 57
SETTLE_S = 3.0
CLAIM_S = 30.0


@dataclass
class Outcome:
    """What one run showed.

    Attributes
    ----------
    same_tokens, same_bytes : bool
        Greedy tokens equal those computed; every chunk loaded is the chunk that was saved.
    loaded_chunks, after_damage_chunks : int
        Chunks of the first rank that came from the store: whole, and with one damaged.
    """

    mode: str
    tp: int
    pp: int
    session_tokens: int
    computed_ttft_s: float
    served_ttft_s: float
    damaged_ttft_s: float
    served_cached_tokens: int
    loaded_chunks: int
    after_damage_chunks: int
    same_tokens: bool
    same_tokens_after_damage: bool
    same_bytes: bool


class Run:
    """One volume, one model, and vLLM started again and again."""

    def __init__(self, directory: Path, services: Services, mode: str, tp: int, pp: int) -> None:
        self.directory, self.services = directory, services
        self.mode, self.tp, self.pp = mode, tp, pp
        self.ranks = ranks = tp * pp
        self.trace = directory / "trace"
        make_tiny_model(directory / MODEL, CONTEXT_TOKENS)
        self.config = write_config(directory, MODEL)
        told = yaml.safe_load(self.config.read_text())
        told["volume"]["shards"] = ranks
        told["volume"]["object"] = CHUNK_TOKENS * KV_BYTES_PER_TOKEN // ranks
        self.config.write_text(yaml.safe_dump(told))
        format_volume(self.config)
        self._warm_ups = 0

    def start(self, *, store: bool) -> str:
        """Start vLLM and warm it up; return its address."""
        lmcache, http, port = free_ports(3)
        ports = Ports(lmcache, http, port)
        arguments = vllm_arguments(ports, MODEL, "cpu") | {
            "enable-prefix-caching": False,
            "tensor-parallel-size": self.tp,
            "pipeline-parallel-size": self.pp,
            "kv-transfer-config": self._connector(),
        }
        if not store:
            del arguments["kv-transfer-config"]
        command = vllm_command(arguments, "cpu", self.directory)
        sockets = Path(tempfile.mkdtemp(prefix="fx"))
        environment = server_environment(os.environ, self.directory, sockets, "cpu")
        environment["PYTHONPATH"] = str(TESTS)
        environment["FX100_E2E_TRACE"] = str(self.trace)
        if self.ranks > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(r) for r in range(self.ranks))
        log = self.directory / f"vllm-{self._warm_ups}.log"
        service = self.services.start("vllm", command, environment, self.directory, log)
        service.wait_ready(f"{ports.vllm_url}/health")
        self._warm_ups += 1
        complete(ports.vllm_url, MODEL, warm_up_prompt(self._warm_ups), 2)
        return ports.vllm_url

    def _connector(self) -> dict[str, object]:
        return {
            "kv_connector": "CpuLMCacheConnector",
            "kv_connector_module_path": "support.cpu_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.chunk_size": CHUNK_TOKENS,
                "lmcache.local_cpu": False,
                "lmcache.max_local_cpu_size": 0.5,
                "lmcache.pre_caching_hash_algorithm": "sha256_cbor",
                "lmcache.storage_plugins": ["fx100"],
                **MODES[self.mode],
                "lmcache.extra_config": {
                    "storage_plugin.fx100.module_path": "fx100_lmcache.lmcache.plugin",
                    "storage_plugin.fx100.class_name": "FX100StoragePlugin",
                    "fx100.config": str(self.config),
                },
            },
        }

    def chunks(self, what: str, *, rank: int = 0) -> dict[tuple[int, int], set[str]]:
        """Return the hashes of what was saved or loaded, by tokens."""
        found: dict[tuple[int, int], set[str]] = {}
        for line in self.trace.read_text().splitlines():
            kind, of, start, end, mark = line.split()
            if kind == what and int(of) == rank:
                found.setdefault((int(start), int(end)), set()).add(mark)
        return found

    def same_bytes(self) -> bool:
        """Whether everything loaded was saved at the same place before."""
        return all(
            marks <= self.chunks("saved", rank=rank).get(place, set())
            for rank in range(self.ranks)
            for place, marks in self.chunks("loaded", rank=rank).items()
        )

    def forget_loads(self) -> None:
        lines = self.trace.read_text().splitlines(keepends=True)
        self.trace.write_text("".join(line for line in lines if line.startswith("saved")))

    @property
    def objects_per_chunk(self) -> int:
        """Objects that a chunk is stored as."""
        return LAYERS // self.pp if self.mode == "layerwise" else 1

    def _mount(self) -> Mounted:
        """Mount the volume as soon as the killed worker is gone."""
        until = time.monotonic() + CLAIM_S
        while True:
            try:
                return mount(settings.load(self.config), shards=[0])
            except ClaimError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def damage(self, number: int) -> None:
        """Flip one bit in the object of the session that was written as this one."""
        mounted = self._mount()
        try:
            written = [one for batch in mounted.store.oldest_first() for one in batch]
            warm_up = 2 * self.objects_per_chunk  # of the first warm-up
            core = mounted.store._core
            row = core.catalog.find_one(written[warm_up + number - 1][0])
            location, _ = core.catalog.entry(row).pieces[0]
            member, block, _ = unpack_location(location)
            offset = core.geometry.block_offset(member, block)
            path = mounted.volume.members[member].name
        finally:
            mounted.close()
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def run(directory: Path, mode: str, tp: int, pp: int, session_tokens: int) -> Outcome:
    """Serve, kill, serve again; see the module."""
    session = Session(session_tokens)
    with Services() as services:
        worker = Run(directory, services, mode, tp, pp)
        url = worker.start(store=True)
        for prompt in session.prompts():
            session.add_answer(complete(url, MODEL, prompt, ANSWER_TOKENS).output_tokens)
        time.sleep(SETTLE_S)
        services.kill_all()
        prompt = session.next_prompt()
        prompt += prompt[: 2 * CHUNK_TOKENS]  # a whole chunk at least is computed
        worker.forget_loads()

        computed = _turn(worker, services, prompt, store=False)
        number = min(DAMAGED, session_tokens // CHUNK_TOKENS // 2)
        worker.damage(number * worker.objects_per_chunk)
        damaged = _turn(worker, services, prompt, store=True)
        after_damage, same_bytes = len(worker.chunks("loaded")), worker.same_bytes()
        worker.forget_loads()
        served = _turn(worker, services, prompt, store=True)
        return Outcome(
            mode,
            tp,
            pp,
            session_tokens,
            computed.ttft_s,
            served.ttft_s,
            damaged.ttft_s,
            served.cached_tokens,
            len(worker.chunks("loaded")),
            after_damage,
            served.output_tokens == computed.output_tokens,
            damaged.output_tokens == computed.output_tokens,
            same_bytes and worker.same_bytes(),
        )


def _turn(worker: Run, services: Services, prompt: list[int], *, store: bool) -> Completion:
    url = worker.start(store=store)
    done = complete(url, MODEL, prompt, ANSWER_TOKENS)
    services.check_alive()
    time.sleep(SETTLE_S if store else 0.0)
    services.kill_all()
    return done


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("mode", "tp", "pp"),
    [("sync", 1, 1), ("async", 1, 1), ("layerwise", 1, 1), ("sync", 2, 1), ("sync", 1, 2)],
)
def test_a_session_comes_back_after_sigkill(tmp_path: Path, mode: str, tp: int, pp: int) -> None:
    outcome = run(tmp_path, mode, tp, pp, 29_800)
    assert outcome.same_tokens
    assert outcome.same_bytes
    assert outcome.loaded_chunks >= 29_800 // CHUNK_TOKENS + 2
    assert outcome.served_cached_tokens >= outcome.loaded_chunks * CHUNK_TOKENS
    assert outcome.same_tokens_after_damage
    assert outcome.after_damage_chunks > 0
    if mode != "layerwise":  # there, layers before the damaged one are loaded in vain
        assert outcome.after_damage_chunks < outcome.loaded_chunks


def main() -> int:
    """Run once and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel ranks")
    parser.add_argument("--tokens", type=int, default=29_800)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="fx100-e2e-"))
    directory.mkdir(parents=True, exist_ok=True)
    outcome = run(directory.resolve(), options.mode, options.tp, options.pp, options.tokens)
    print(json.dumps(asdict(outcome), indent=2))
    return 0 if outcome.same_tokens and outcome.same_tokens_after_damage else 1


if __name__ == "__main__":
    sys.exit(main())
