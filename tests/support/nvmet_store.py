"""The store of the lab: arrays of one namespace per port, and traffic that checks every byte."""

from __future__ import annotations

import asyncio
import random
import string
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.config import load
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.nvmf.snapshot import Controller
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.store import LoadItem, LoadResult, PutItem
from fx100_lmcache.store.types import PutResult
from fx100_lmcache.testing.harness import META, digest_of
from fx100_lmcache.volume.format import format_members, plan_format
from support.nvmet_target import ADDRESS, Target, TargetPort, TargetSubsystem, sh

KIB, MIB = 1 << 10, 1 << 20
OBJECT_BYTES = 256 * KIB
PATIENCE_S = 60.0
"""Longer than anything under test; waiting longer is a failure with a name."""
PREFILLED = 60
"""Objects that are there before the traffic begins."""
GRACE_S = 1.0
"""What a call may take beyond its deadline: the second promise."""


class Array:
    """Subsystems with one namespace each, every one behind a port of its own, and their YAML.

    With transport loop, which has no addresses, all of them share one port.
    """

    def __init__(
        self, target: Target, host: HostIdentity, folder: Path, transport: str = "tcp"
    ) -> None:
        self.target = target
        self.host = host
        self.transport = transport
        self.yaml = folder / "fx100.yaml"
        self.subsystems: list[TargetSubsystem] = []
        self.ports: list[list[TargetPort]] = []

    def add(
        self,
        size_bytes: int = 64 * MIB,
        lba_bytes: int = 512,
        paths: int = 1,
        thin: Path | None = None,
    ) -> None:
        """Make a subsystem with namespace 1, offered by `paths` new ports.

        The namespace is thin if a folder is given that its file goes to.
        """
        subsystem = self.target.subsystem(string.ascii_lowercase[len(self.subsystems)])
        if thin is None:
            subsystem.add_namespace(1, size_bytes, lba_bytes)
        else:
            subsystem.add_thin_namespace(1, size_bytes, thin)
        ports = [self._port() for _ in range(paths)]
        for port in ports:
            port.offer(subsystem)
        self.subsystems.append(subsystem)
        self.ports.append(ports)

    def _port(self) -> TargetPort:
        if self.transport == "tcp":
            return self.target.tcp_port()
        return self.ports[0][0] if self.ports else self.target.loop_port()

    def configure(
        self,
        *,
        timers: dict[str, str] | None = None,
        members: int | None = None,
        reconnect: bool = False,
        **sections: Any,
    ) -> Path:
        """Write the YAML: all subsystems, and the first `members` of them as the volume."""
        chosen = self.subsystems[: members or len(self.subsystems)]
        volume = {
            "members": [{"nvme": {"uuid": each.namespaces[1].uuid}} for each in chosen],
            "object": OBJECT_BYTES,
            **sections.pop("volume", {}),
        }
        listed = [
            {
                "subsystem_nqn": subsystem.nqn,
                "transport": self.transport,
                "addresses": [
                    {"traddr": ADDRESS, "trsvcid": port.service}
                    for port in ports
                    if port.transport == "tcp"
                ],
                "reconnect_delay": "1s",
                **(timers or {}),
            }
            for subsystem, ports in zip(self.subsystems, self.ports, strict=True)
        ]
        nvme: dict[str, Any] = {
            "host_nqn": self.host.nqn,
            "host_id": self.host.id,
            "subsystems": listed,
        }
        nvme["reconnect"] = reconnect
        deadlines = {"load": "3s", "store": "5s", "probe_interval": "200ms", "close": "5s"}
        document = {
            "volume": volume,
            "nvme": nvme,
            "io": {"reader_threads": 4, "writer_threads": 2, "direct": "require"},
            **sections,
            "deadlines": {**deadlines, **sections.pop("deadlines", {})},
        }
        self.yaml.write_text(yaml.safe_dump(document))
        return self.yaml

    def connect(self, order: Sequence[int] | None = None) -> None:
        """Connect all subsystems through the command line, or some in a given order."""
        document = yaml.safe_load(self.yaml.read_text())
        listed = document["nvme"]["subsystems"]
        chosen = [listed[number] for number in (range(len(listed)) if order is None else order)]
        document["nvme"]["subsystems"] = chosen
        reordered = self.yaml.with_name("connect.yaml")
        reordered.write_text(yaml.safe_dump(document))
        result = fx100("nvme", "connect", reordered)
        assert result.exit_code == 0, result.output

    def disconnect(self, *numbers: int) -> None:
        """Remove a subsystem's controllers, as an operator does; all of them by default."""
        for number in numbers or range(len(self.subsystems)):
            sh("nvme", "disconnect", "-n", self.subsystems[number].nqn)

    def controllers(self, number: int) -> list[Controller]:
        """Return what the kernel has of a subsystem, live or not."""
        return list(asyncio.run(Sysfs().snapshot()).controllers(self.subsystems[number].nqn))

    def format(self) -> None:
        config = load(self.yaml)
        for member in format_members(config, plan_format(config)).members:
            member.close()

    @contextmanager
    def mounted(self) -> Iterator[Mounted]:
        """Open the store; nothing may be left in the kernel at the end."""
        opened = mount(load(self.yaml))
        try:
            yield opened
        finally:
            left = opened.close()
        assert left == 0, f"{left} transfers were left in the kernel"


def fx100(*arguments: object) -> Any:
    """Run the command line in this process."""
    from typer.testing import CliRunner

    from fx100_lmcache.cli import app

    return CliRunner().invoke(app, [str(each) for each in arguments])


def bytes_of(name: str, length: int = OBJECT_BYTES) -> bytes:
    """Contents of an object: they follow from its name and repeat nowhere."""
    return random.Random(name).randbytes(length)


@dataclass(frozen=True)
class Call:
    """One call of the store: what came of it, and how long the caller waited."""

    kind: str
    name: str
    outcome: str
    at_s: float
    took_s: float


def _answered(results: list[PutResult], done: threading.Event, found: list[PutResult]) -> None:
    results += found
    done.set()


def put(mounted: Mounted, name: str, length: int = OBJECT_BYTES) -> Call:
    """Store an object; the outcome is ``stored`` or the reason why not."""
    buffer = zero_buffer(-(-length // 4096) * 4096)
    buffer.view[:length] = bytes_of(name, length)
    buffer.length = length
    done, start = threading.Event(), time.monotonic()
    results: list[PutResult] = []
    mounted.store.put([PutItem(digest_of(name), META, buffer)], partial(_answered, results, done))
    assert done.wait(PATIENCE_S), f"put {name} was never reported"
    outcome = "stored" if results[0].stored else results[0].reason
    return Call("put", name, outcome, start, time.monotonic() - start)


def put_at_last(mounted: Mounted, name: str) -> None:
    """Store an object; if all members were away for long, the claims must be confirmed first."""
    wait_until(f"{name} is stored", lambda: put(mounted, name).outcome == "stored")


@dataclass
class Loading:
    """A load on its way."""

    name: str
    length: int
    buffer: IoBuffer
    start_s: float
    done: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    results: list[LoadResult] = field(default_factory=list)
    took_s: float = 0.0

    def finish(self, results: list[LoadResult]) -> None:
        self.took_s = time.monotonic() - self.start_s
        self.results = results
        self.done.set()

    def wait(self) -> Call:
        """Return ``hit`` for the right bytes, ``WRONG`` for others, else the reason."""
        assert self.done.wait(PATIENCE_S), f"load {self.name} was never reported"
        [result] = self.results
        outcome = result.reason
        if result.length:
            right = bytes(self.buffer.view[: self.length]) == bytes_of(self.name, self.length)
            outcome = "hit" if right and result.length == self.length else "WRONG"
        return Call("load", self.name, outcome, self.start_s, self.took_s)


def start_load(
    mounted: Mounted, name: str, length: int = OBJECT_BYTES, *, hold: bool = False
) -> Loading:
    buffer = zero_buffer(-(-length // 4096) * 4096)
    loading = Loading(name, length, buffer, time.monotonic())
    item = LoadItem(digest_of(name), buffer, lambda _m, _n: True, loading.released.set)
    mounted.store.load([item], loading.finish, hold=hold)
    return loading


def get(mounted: Mounted, name: str, length: int = OBJECT_BYTES) -> Call:
    return start_load(mounted, name, length).wait()


def promised(mounted: Mounted, names: Sequence[str]) -> set[str]:
    """Return what a lookup says could be loaded now."""
    found = mounted.store.lookup([digest_of(name) for name in names])
    return {name for name, hit in zip(names, found.tolist(), strict=True) if hit}


def on_member(mounted: Mounted, name: str, member: int) -> bool:
    """Whether an object needs this member: for its inode or for one of its pieces."""
    core = mounted.store._core
    mask = int(core.catalog._members[core.catalog.find_one(digest_of(name))])
    return bool(mask >> member & 1)


def state_of(mounted: Mounted, member: int) -> str:
    return mounted.engine.states()[member].state


def wait_until(what: str, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> float:
    """Wait for a condition; return how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < patience_s, f"not within {patience_s:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - start


class Traffic:
    """Threads that put, look up and load all the time.

    Every load that hits must give the bytes that belong to the name, whatever happens below.
    """

    def __init__(
        self,
        mounted: Mounted,
        readers: int = 2,
        length: int = OBJECT_BYTES,
        pause_s: float = 0.1,
        prefill: int = PREFILLED,
    ) -> None:
        self.mounted = mounted
        self.length = length
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        for number in range(prefill):
            assert put(mounted, f"old-{number}", length).outcome == "stored"
            self.names.append(f"old-{number}")
        self._threads = [threading.Thread(target=self._run, args=(self._write, pause_s))]
        self._threads += [
            threading.Thread(target=self._run, args=(self._reader(seed), 0.01))
            for seed in range(readers)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        wait_until("traffic flows", lambda: len(self.since(0.0, "hit")) >= 10)
        return self

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        if problem[0] is None:
            assert not any(thread.is_alive() for thread in self._threads), "a caller hangs"
            assert not self.failures, self.failures

    def since(self, at_s: float, *outcomes: str, kind: str = "load") -> list[Call]:
        """Return the calls that began at or after a time, with some outcomes or any."""
        return [
            call
            for call in list(self.calls)
            if call.at_s >= at_s
            and call.kind == kind
            and (not outcomes or call.outcome in outcomes)
        ]

    def check(self) -> None:
        """No wrong byte, and no call past its deadline and a second."""
        deadlines = self.mounted.config.deadlines
        allowed = {"load": deadlines.load_s + GRACE_S, "put": deadlines.store_s + GRACE_S}
        wrong = [call for call in self.calls if call.outcome == "WRONG"]
        late = [call for call in self.calls if call.took_s > allowed[call.kind]]
        assert not wrong, f"wrong bytes: {wrong[:5]}"
        assert not late, f"past the deadline: {late[:5]}"

    def all_back(self) -> None:
        """Whatever was stored can be read again: a lost path loses no entry."""
        missing = set(self.names) - promised(self.mounted, self.names)
        assert not missing, f"{len(missing)} of {len(self.names)} entries are gone"
        outcomes = {get(self.mounted, name, self.length).outcome for name in self.names}
        assert outcomes == {"hit"}

    def summary(self) -> str:
        """Return outcomes with their numbers and the slowest call of each, for the log."""
        lines = []
        for key in sorted({(call.kind, call.outcome) for call in self.calls}):
            took = [call.took_s for call in self.calls if (call.kind, call.outcome) == key]
            lines.append(f"{' '.join(key)}: {len(took)}, slowest {max(took):.2f} s")
        return "; ".join(lines)

    def _run(self, step: Callable[[], None], pause_s: float) -> None:
        try:
            while not self._stop.wait(pause_s):
                step()
        except BaseException as problem:  # noqa: BLE001  # shown when the test ends
            self.failures.append(problem)

    def _write(self) -> None:
        call = put(self.mounted, f"new-{len(self.calls)}", self.length)
        self.calls.append(call)
        if call.outcome == "stored":
            self.names.append(call.name)

    def _reader(self, seed: int) -> Callable[[], None]:
        chooser = random.Random(seed)

        def read() -> None:
            name = chooser.choice(self.names)
            if promised(self.mounted, [name]):
                self.calls.append(get(self.mounted, name, self.length))
            else:
                self.calls.append(Call("load", name, "not promised", time.monotonic(), 0.0))

        return read
