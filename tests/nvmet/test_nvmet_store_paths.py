"""Two paths to every namespace: ANA failover under traffic, and no usable path at all."""

import time

import pytest
from nvmet_store import Array, Traffic, put, wait_until
from nvmet_target import Target

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def array(target: Target, host, tmp_path) -> Array:
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


def test_failover_misses_at_most_what_was_in_flight(array: Array):
    with array.mounted() as mounted, Traffic(mounted, readers=3) as traffic:
        start = time.monotonic()
        for states in (("inaccessible", "optimized"), ("optimized", "inaccessible")):
            set_paths(array, *states)
            switched = time.monotonic()
            wait_until("loads hit", lambda at=switched: len(traffic.since(at, "hit")) >= 10)
        time.sleep(1)
        traffic.__exit__(None)
        traffic.check()
        traffic.all_back()

        missed = [call for call in traffic.since(start) if call.outcome != "hit"]
        assert len(missed) <= 2 * 3  # two switches, each with one load in flight per reader
        assert mounted.store.problems() == []
        print(f"\nfailover: {traffic.summary()}")


def test_lost_port_of_two_is_covered_by_the_other(array: Array):
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


def test_without_a_usable_path_loads_end_at_their_deadline(array: Array):
    with array.mounted() as mounted, Traffic(mounted) as traffic:
        set_paths(array, "inaccessible", "inaccessible")
        wait_until("lookups promise nothing", lambda: mounted.engine.down_mask() == 0b11)
        set_paths(array, "optimized", "inaccessible")
        back_s = wait_until("all are back", lambda: mounted.engine.down_mask() == 0)
        traffic.__exit__(None)
        traffic.check()
        traffic.all_back()
        assert put(mounted, "after").outcome == "stored"  # erases what could not be erased
        wait_until("no problem is left", lambda: mounted.store.problems() == [])
        print(f"\nno usable path: back after {back_s:.1f} s; {traffic.summary()}")
