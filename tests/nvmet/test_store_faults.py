"""The store under traffic while a real path or namespace goes, and comes back.

In every case: no wrong byte, no call past its deadline and a second, lookups stop promising what
cannot be read, the other member goes on, the member comes back without reopening the store, no
entry is lost, and status and counters tell what happened.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.admin.inspect import inspect
from fx100_lmcache.config import load
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.nvmf.plan import HostIdentity
from support.nvmet_store import (
    MIB,
    PREFILLED,
    Array,
    Traffic,
    get,
    on_member,
    promised,
    put,
    put_at_last,
    start_load,
    state_of,
    wait_until,
)
from support.nvmet_target import Target

HIT = 0  # the member that the fault strikes; objects have width 1, so half of them lie elsewhere
pytestmark = pytest.mark.timeout(180)


@dataclass
class Running:
    """A store of two members under traffic."""

    array: Array
    mounted: Mounted
    traffic: Traffic

    @property
    def port(self) -> Any:
        return self.array.ports[HIT][0]

    @property
    def namespace(self) -> Any:
        return self.array.subsystems[HIT].namespaces[1]

    def names(self, member: int) -> list[str]:
        """Return objects that lie on one member only."""
        return [
            name for name in self.traffic.names[:PREFILLED] if on_member(self.mounted, name, member)
        ]

    def wait_away(self) -> float:
        """Wait until the store knows that the member is away; check what it promises then."""
        took_s = wait_until("the member is not up", lambda: state_of(self.mounted, HIT) != "up")
        assert promised(self.mounted, self.names(HIT)) == set()
        others = set(self.names(1 - HIT))
        assert others
        assert promised(self.mounted, sorted(others)) == others
        return took_s

    def others_go_on(self) -> None:
        """Loads from the other member hit, puts are stored there, nothing waits for the fault."""
        start = time.monotonic()
        stored = partial(self.traffic.since, start, "stored", kind="put")
        wait_until("puts are stored elsewhere", lambda: len(stored()) >= 5)
        wait_until("loads hit elsewhere", lambda: len(self.traffic.since(start, "hit")) >= 10)
        assert not self.traffic.since(start, "error", "deadline")

    def told(self) -> None:
        """The running store and ``fx100 status`` say that something is wrong, and with what."""
        problems = self.mounted.store.problems()
        device = self.mounted.engine.member(HIT).name
        assert any(device in problem for problem in problems), problems
        start = time.monotonic()
        report = inspect(self.array.yaml)
        assert not report.healthy
        assert report.problems
        print(f"  status after {time.monotonic() - start:.1f} s: {report.problems[0].what}")

    def wait_back(self) -> float:
        """Wait until the member is up again, by itself, and everything can be read."""
        took_s = wait_until("the member is back", lambda: state_of(self.mounted, HIT) == "up")
        start = time.monotonic()
        wait_until("loads hit again", lambda: self.fresh_hits(start))
        return took_s

    def fresh_hits(self, start: float) -> bool:
        hits = self.traffic.since(start, "hit")
        return any(on_member(self.mounted, call.name, HIT) for call in hits)

    def end(self, what: str, *times: float) -> None:
        """Check what must hold at the end of every fault."""
        self.traffic.__exit__(None)
        self.traffic.check()
        self.traffic.all_back()
        store = self.mounted.store
        put_at_last(self.mounted, "after")  # erases what could not be erased
        wait_until("no problem is left", lambda: store.problems() == [])
        space = store.space()
        assert space.quarantined == 0
        assert space.free + space.used == space.total
        assert get(self.mounted, "after").outcome == "hit"
        shown = ", ".join(f"{each:.1f} s" for each in times)
        print(f"\n{what}: away and back after {shown}; {self.traffic.summary()}")
        print(f"  counts: {store.counts()}")


@pytest.fixture
def array(target: Target, host: HostIdentity, tmp_path: Path) -> Array:
    made = Array(target, host, tmp_path)
    made.add()
    made.add()
    return made


@contextmanager
def running(array: Array, **settings: Any) -> Iterator[Running]:
    """Open a store of width 1 on the array, with traffic."""
    array.configure(stripe={"width": 1}, **settings)
    array.connect()
    array.format()
    with array.mounted() as mounted, Traffic(mounted) as traffic:
        yield Running(array, mounted, traffic)


def test_lost_path_fails_fast_and_the_same_descriptor_comes_back(array: Array) -> None:
    with running(array) as run:  # fast_io_fail_tmo 2 s: before the deadline of 3 s
        before = run.mounted.engine.member(HIT)
        run.port.take_away()
        away_s = run.wait_away()
        run.others_go_on()
        run.told()
        run.port.give_back()
        back_s = run.wait_back()

        assert run.mounted.engine.member(HIT) is before
        assert run.mounted.store.counts()["load_miss_error"] > 0
        run.end("port away, fast_io_fail", away_s, back_s)


def test_controller_dropped_after_its_loss_time_out_comes_back_after_a_connect(
    array: Array,
) -> None:
    timers = {"ctrl_loss_timeout": "3s", "fast_io_fail": "3s"}
    with running(array, timers=timers) as run:
        before = run.mounted.engine.member(HIT)
        run.port.take_away()
        away_s = run.wait_away()
        wait_until("the node vanishes", lambda: not array.controllers(HIT))
        run.others_go_on()
        run.told()
        run.port.give_back()
        time.sleep(1)
        assert state_of(run.mounted, HIT) != "up"  # `nvme.reconnect` is off
        array.connect()
        back_s = run.wait_back()

        assert run.mounted.engine.member(HIT) is not before
        run.end("port away, ctrl_loss", away_s, back_s)


def test_controller_dropped_after_its_loss_time_out_is_connected_again_by_itself(
    array: Array,
) -> None:
    timers = {"ctrl_loss_timeout": "3s", "fast_io_fail": "3s"}
    with running(array, timers=timers, reconnect=True) as run:
        before = run.mounted.engine.member(HIT)
        run.port.take_away()
        away_s = run.wait_away()

        def failures() -> int:
            return run.mounted.store.counts().get("nvme_reconnect_failures", 0)

        wait_until("the node vanishes", lambda: not array.controllers(HIT))
        wait_until("a connect fails", lambda: failures() >= 1)
        run.others_go_on()
        run.told()
        run.port.give_back()
        back_s = run.wait_back()

        assert run.mounted.engine.member(HIT) is not before
        assert run.mounted.store.counts()["nvme_reconnects"] == 1
        run.end("port away, ctrl_loss, reconnected", away_s, back_s)


def test_silent_packet_loss_is_bounded_by_our_deadline(array: Array) -> None:
    with running(array) as run:
        run.port.drop_packets()
        away_s = run.wait_away()
        run.others_go_on()
        run.told()
        run.port.stop_dropping()
        back_s = run.wait_back()

        assert run.mounted.store.counts()["deadline_misses"] > 0
        run.end("packets dropped", away_s, back_s)


def test_load_into_foreign_memory_stays_open_until_the_kernel_lets_go(array: Array) -> None:
    """The one exception to the deadline: with `hold`, the buffer stays owned by the load."""
    threads = {"reader_threads": 16, "writer_threads": 2, "direct": "require"}
    with running(array, io=threads) as run:  # so many that no load waits for another one
        names = run.names(HIT)
        run.port.drop_packets()
        held = [start_load(run.mounted, name, hold=True) for name in names[:3]]
        released = [start_load(run.mounted, name) for name in names[3:6]]
        away_s = run.wait_away()
        for loading in released:  # without hold: reported in time, and the buffer is spoken of
            assert loading.wait().outcome == "deadline"
            assert loading.results[0].in_kernel
            assert not loading.released.is_set()
        assert not any(loading.done.is_set() for loading in held)
        assert get(run.mounted, names[6]).outcome == "member_down"  # no other load gets caught
        run.port.stop_dropping()
        back_s = run.wait_back()

        for loading in held:
            assert loading.wait().outcome in ("hit", "error", "deadline")
            assert not loading.results[0].in_kernel
        for loading in released:
            assert loading.released.wait(10)
        run.end("held loads", away_s, back_s)


def test_disabled_namespace_comes_back_under_another_name(array: Array) -> None:
    with running(array) as run:
        before = run.mounted.engine.member(HIT).name
        run.namespace.disable()
        away_s = run.wait_away()
        run.others_go_on()
        run.told()
        run.namespace.enable()
        back_s = run.wait_back()

        assert run.mounted.engine.member(HIT).name != before
        run.end("namespace disabled", away_s, back_s)


def test_removed_controller_comes_back_after_a_connect(array: Array) -> None:
    with running(array) as run:
        array.disconnect(HIT)
        away_s = run.wait_away()
        run.others_go_on()
        run.told()
        array.connect()
        back_s = run.wait_back()
        run.end("controller removed", away_s, back_s)


def test_member_comes_back_although_another_one_hangs(array: Array) -> None:
    """A probe that looks for one member must not get caught by the other."""
    with running(array) as run:
        run.namespace.disable()
        away_s = run.wait_away()
        other = run.array.ports[1 - HIT][0]
        other.drop_packets()
        wait_until("both are away", lambda: state_of(run.mounted, 1 - HIT) != "up")
        run.namespace.enable()
        back_s = run.wait_back()
        assert state_of(run.mounted, 1 - HIT) != "up"
        other.stop_dropping()
        wait_until("the other is back", lambda: state_of(run.mounted, 1 - HIT) == "up")
        run.end("one renamed, one hanging", away_s, back_s)


def is_up(mounted: Mounted) -> bool:
    return state_of(mounted, HIT) == "up"


def test_shards_of_two_processes_come_back_on_their_own(array: Array) -> None:
    """As with one rank per store: each finds the renamed namespace, and keeps its own shard."""
    config = array.configure(volume={"shards": 2})
    array.connect()
    array.format()
    stores = [mount(load(config), shards=[shard]) for shard in range(2)]
    try:
        for shard, mounted in enumerate(stores):
            assert put(mounted, f"object-{shard}").outcome == "stored"
        namespace = array.subsystems[HIT].namespaces[1]
        namespace.disable()
        for shard, mounted in enumerate(stores):
            while state_of(mounted, HIT) == "up":
                assert get(mounted, f"object-{shard}").outcome == "error"
        namespace.enable()
        for mounted in stores:
            wait_until("the member is back", partial(is_up, mounted))
        for shard, mounted in enumerate(stores):
            assert get(mounted, f"object-{shard}").outcome == "hit"
            assert promised(mounted, [f"object-{1 - shard}"]) == set()
            assert put(mounted, f"again-{shard}").outcome == "stored"
    finally:
        assert [mounted.close() for mounted in stores] == [0, 0]


def test_target_restart(array: Array) -> None:
    with running(array) as run:
        for ports in array.ports:
            ports[0].take_away()
        for subsystem in array.subsystems:
            subsystem.namespaces[1].disable()
        wait_until("all are away", lambda: run.mounted.engine.down_mask() == 0b11)
        assert promised(run.mounted, run.traffic.names) == set()
        assert get(run.mounted, run.traffic.names[0]).outcome == "member_down"
        for subsystem in array.subsystems:
            subsystem.namespaces[1].enable()
        for ports in array.ports:
            ports[0].give_back()
        back_s = wait_until("all are back", lambda: run.mounted.engine.down_mask() == 0)
        run.end("target restart", back_s)


def test_striped_volume_goes_on_with_the_rest(
    target: Target, host: HostIdentity, tmp_path: Path
) -> None:
    """With objects over all members a lost member costs what was there, but not the service."""
    array = Array(target, host, tmp_path)
    for _ in range(3):
        array.add(192 * MIB)
    length = 3 * MIB
    array.configure(volume={"object": length})
    array.connect()
    array.format()
    with (
        array.mounted() as mounted,
        Traffic(mounted, length=length, pause_s=0.5, prefill=12) as traffic,
    ):
        assert all(on_member(mounted, name, HIT) for name in traffic.names)
        array.ports[HIT][0].take_away()
        wait_until("the member is not up", lambda: state_of(mounted, HIT) != "up")
        old = [name for name in traffic.names if on_member(mounted, name, HIT)]
        assert promised(mounted, old) == set()
        start = time.monotonic()
        stored = partial(traffic.since, start, "stored", kind="put")
        wait_until("puts go to the rest", lambda: len(stored()) >= 5)
        assert {get(mounted, call.name, length).outcome for call in stored()} == {"hit"}
        array.ports[HIT][0].give_back()
        wait_until("the member is back", lambda: state_of(mounted, HIT) == "up")
        traffic.__exit__(None)
        traffic.check()
        traffic.all_back()


def test_controller_reset_is_not_noticed(array: Array) -> None:
    with running(array) as run:
        [controller] = array.controllers(HIT)
        start = time.monotonic()
        for _ in range(3):
            reset(controller.name)
            time.sleep(0.3)
        time.sleep(1)

        assert not run.traffic.since(start, "error", "deadline", "not promised", "member_down")
        assert run.traffic.since(start, "hit")
        run.end("controller reset", 0.0)


def reset(name: str) -> None:
    from support.nvmet_target import sh

    sh("nvme", "reset", f"/dev/{name}")


@pytest.mark.parametrize("netem", [{"delay_ms": 20}, {"delay_ms": 1, "loss_percent": 5}])
def test_slow_and_lossy_paths_only_cost_time(array: Array, netem: dict[str, Any]) -> None:
    with running(array, deadlines={"load": "20s", "store": "20s", "stuck_io": "60s"}) as run:
        start = time.monotonic()
        run.port.delay_packets(**netem)
        time.sleep(4)
        run.port.stop_delaying()

        assert not run.traffic.since(start, "error", "not promised", "member_down")
        assert run.traffic.since(start, "hit")
        run.end(f"netem {netem}", 0.0)


def test_only_object_of_a_lost_path_is_not_dropped(array: Array) -> None:
    """Asking for one object again and again while its path goes is no proof of bad media."""
    array.configure(stripe={"width": 1})
    array.connect()
    array.format()
    with array.mounted() as mounted:
        names = [f"object-{number}" for number in range(4)]
        for name in names:
            assert put(mounted, name).outcome == "stored"
        [first, *_] = [name for name in names if on_member(mounted, name, HIT)]
        array.ports[HIT][0].take_away()
        outcomes = [get(mounted, first).outcome for _ in range(8)]
        assert set(outcomes) <= {"error", "deadline", "member_down"}
        array.ports[HIT][0].give_back()
        wait_until("the member is back", lambda: state_of(mounted, HIT) == "up")
        assert get(mounted, first).outcome == "hit", outcomes
