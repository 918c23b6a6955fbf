"""Two paths to every namespace: ANA failover under traffic, no usable path, and one path lost."""

import time
from functools import partial
from pathlib import Path

import pytest

from fx100_lmcache.mount import Mounted
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.volume import opening as access
from support.nvmet_store import Array, Traffic, put_at_last, wait_until
from support.nvmet_target import Target, sh

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def array(target: Target, host: HostIdentity, tmp_path: Path) -> Array:
    made = Array(target, host, tmp_path)
    for _ in range(2):
        made.add(paths=2)
    for _, second in made.ports:
        second.set_ana_state("inaccessible")
    made.configure()
    made.connect()
    made.format()
    return made


def set_paths(array: Array, first: str, second: str) -> None:
    for one, other in array.ports:
        one.set_ana_state(first)
        other.set_ana_state(second)


def hits_since(traffic: Traffic, at_s: float) -> bool:
    return len(traffic.since(at_s, "hit")) >= 10


def test_failover_misses_at_most_what_was_in_flight(array: Array) -> None:
    with array.mounted() as mounted, Traffic(mounted, readers=3) as traffic:
        start = time.monotonic()
        for states in (("inaccessible", "optimized"), ("optimized", "inaccessible")):
            set_paths(array, *states)
            switched = time.monotonic()
            wait_until("loads hit", partial(hits_since, traffic, switched))
        time.sleep(1)
        traffic.__exit__(None)
        traffic.check()
        traffic.all_back()

        missed = [call for call in traffic.since(start) if call.outcome != "hit"]
        assert len(missed) <= 2 * 3  # two switches, each with one load in flight per reader
        assert mounted.store.problems() == []
        print(f"\nfailover: {traffic.summary()}")


def test_lost_port_of_two_is_covered_by_the_other(array: Array) -> None:
    set_paths(array, "optimized", "optimized")
    with array.mounted() as mounted, Traffic(mounted, readers=3) as traffic:
        start = time.monotonic()
        for first, _ in array.ports:
            first.take_away()
        time.sleep(4)  # longer than fast_io_fail_tmo
        traffic.__exit__(None)
        traffic.check()
        traffic.all_back()

        missed = [call for call in traffic.since(start) if call.outcome != "hit"]
        assert len(missed) <= 3
        assert mounted.store.problems() == []
        print(f"\nport lost: {traffic.summary()}")


def live(array: Array, number: int) -> list[str]:
    """Return the ports over which a subsystem is connected now."""
    there = array.controllers(number)
    return sorted(each.address.trsvcid for each in there if each.state == "live")


def counted(mounted: Mounted, event: str) -> int:
    return mounted.store.counts().get(event, 0)


def end(mounted: Mounted, traffic: Traffic, what: str) -> None:
    """Check that nothing is lost, and that only what was in flight on the path was missed."""
    traffic.__exit__(None)
    traffic.check()
    traffic.all_back()
    missed = [call for call in traffic.calls if call.outcome not in ("hit", "stored")]
    assert len(missed) <= 3, missed
    assert mounted.store.problems() == []
    print(f"\n{what}: {traffic.summary()}")
    print(f"  counts: {mounted.store.counts()}")


def test_removed_path_of_two_is_connected_again_by_itself(
    array: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOOK_S", 2.0)
    array.configure(reconnect=True)
    set_paths(array, "optimized", "optimized")
    both = live(array, 0)
    assert len(both) == 2
    with array.mounted() as mounted, Traffic(mounted, readers=3) as traffic:
        sh("nvme", "disconnect", "-d", array.controllers(0)[1].name)
        removed = time.monotonic()
        back_s = wait_until("both paths are live", lambda: live(array, 0) == both)
        wait_until("it is counted", lambda: counted(mounted, "nvme_reconnects") == 1)
        wait_until("loads hit", lambda: len(traffic.since(removed, "hit")) >= 10)

        assert counted(mounted, "nvme_reconnect_failures") == 0
        end(mounted, traffic, f"path removed, back after {back_s:.1f} s")


def test_path_of_two_that_the_kernel_gives_up_is_connected_again_by_itself(
    array: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOOK_S", 2.0)
    array.configure(reconnect=True, timers={"ctrl_loss_timeout": "3s", "fast_io_fail": "2s"})
    array.connect()  # sets the time-outs
    set_paths(array, "optimized", "optimized")
    both = live(array, 0)
    second = array.ports[0][1]
    with array.mounted() as mounted, Traffic(mounted, readers=3) as traffic:
        second.take_away()
        wait_until("one path is given up", lambda: len(array.controllers(0)) == 1)
        wait_until("a connect fails", lambda: counted(mounted, "nvme_reconnect_failures") >= 1)
        lost = time.monotonic()
        wait_until("the other one serves", lambda: len(traffic.since(lost, "hit")) >= 10)
        second.give_back()
        back_s = wait_until("both paths are live", lambda: live(array, 0) == both)
        wait_until("it is counted", lambda: counted(mounted, "nvme_reconnects") == 1)

        assert {each.fast_io_fail_s for each in array.controllers(0)} == {2}
        end(mounted, traffic, f"path given up, back after {back_s:.1f} s")


def test_without_a_usable_path_loads_end_at_their_deadline(array: Array) -> None:
    with array.mounted() as mounted, Traffic(mounted) as traffic:
        set_paths(array, "inaccessible", "inaccessible")
        wait_until("lookups promise nothing", lambda: mounted.engine.down_mask() == 0b11)
        set_paths(array, "optimized", "inaccessible")
        back_s = wait_until("all are back", lambda: mounted.engine.down_mask() == 0)
        traffic.__exit__(None)
        traffic.check()
        traffic.all_back()
        put_at_last(mounted, "after")  # erases what could not be erased
        wait_until("no problem is left", lambda: mounted.store.problems() == [])
        print(f"\nno usable path: back after {back_s:.1f} s; {traffic.summary()}")
