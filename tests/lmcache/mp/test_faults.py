"""Devices that fail, hang or are full: a miss or a failed task, in time, and never wrong bytes."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.config import DeadlineConfig
from fx100_lmcache.testing.harness import Rig
from fx100_lmcache.testing.memory import Fault
from support.l2 import (
    CHUNK_BYTES,
    GatedMember,
    Recorder,
    adapter_on,
    bytes_of,
    gated_members,
    key,
    keys,
    memory_obj,
    opened,
    payload,
    threaded_adapter,
    write_config,
)

SIZE = 4096
QUICK = DeadlineConfig(load_s=0.3, store_s=0.3, close_s=1.0, stuck_io_s=0.6)


def shut(members: list[GatedMember]) -> None:
    for member in members:
        member.gate.clear()


def release(members: list[GatedMember]) -> None:
    for member in members:
        member.gate.set()


@pytest.mark.parametrize("skip", range(4))
def test_a_failed_store_is_never_visible(skip: int) -> None:
    rig = Rig.fresh(2, 512 * 1024)
    client = adapter_on(rig)
    objects = [memory_obj(payload(n, SIZE)) for n in range(2)]
    rig.members[0].faults.append(Fault("error", "write", after=skip // 2, value=errno.EIO))
    rig.members[1].faults.append(Fault("error", "write", after=skip // 2, value=errno.EIO))
    result = client.store(keys(2), objects)
    assert not result.is_successful()
    assert result.bytes_transferred() == 0
    missing = [one for one in keys(2) if not client.has(one)]
    assert missing
    rig.reopen()
    client = adapter_on(rig)
    assert [one for one in keys(2) if not client.has(one)] == missing
    assert client.store(keys(2), objects).is_successful()
    for number, obj in enumerate(objects):
        assert client.get(key(number), obj) == payload(number, SIZE)


def test_a_read_error_is_a_miss_of_that_key_alone() -> None:
    rig = Rig.fresh(2, 512 * 1024)
    client = adapter_on(rig)
    client.store(keys(4), [memory_obj(payload(n, SIZE)) for n in range(4)])
    rig.members[0].faults.append(Fault("error", "read", value=errno.EIO))
    objects = [memory_obj(SIZE) for _ in range(4)]
    loaded = client.load(keys(4), objects)
    assert loaded.count(False) == 1
    for number in range(4):
        if loaded[number]:
            assert bytes_of(objects[number]) == payload(number, SIZE)


def test_an_object_being_written_is_not_found() -> None:
    members = gated_members(2, 1 << 20)
    client = threaded_adapter(members, DeadlineConfig())
    shut(members)
    task = client.adapter.submit_store_task(keys(1), [memory_obj(payload(0, SIZE))])
    assert not client.has(key(0))
    release(members)
    assert client.wait_store(task).is_successful()
    assert client.has(key(0))
    client.adapter.close()


def test_a_write_that_never_ends_fails_its_task_and_nothing_else() -> None:
    members = gated_members(1, 4 << 20)
    client = threaded_adapter(members, QUICK)
    assert client.store([key(9)], [memory_obj(payload(9, SIZE))]).is_successful()
    shut(members)
    assert not client.store(keys(1), [memory_obj(payload(0, SIZE))]).is_successful()
    assert not client.has(key(0))
    status = client.adapter.report_status()
    assert status["is_healthy"] is False
    assert status["counts"]["deadline_misses"] >= 1
    assert status["blocks"]["quarantined"] > 0
    release(members)
    client.adapter.close()


def test_a_read_that_hangs_holds_back_its_own_task_only() -> None:
    members = gated_members(2, 4 << 20)
    client = threaded_adapter(members, QUICK.model_copy(update={"stuck_io_s": 300.0}), readers=8)
    for number in range(2):
        client.store(keys(1, number), [memory_obj(payload(number, SIZE))])
    members[0].gate.clear()
    tasks = [
        client.adapter.submit_load_task(keys(1, number), [memory_obj(SIZE)]) for number in range(2)
    ]
    done: list[Any] = []
    while not done:
        client.wait(client.adapter.get_load_event_fd())
        done = [b for b in map(client.adapter.query_load_result, tasks) if b is not None]
    assert len(done) == 1
    assert done[0].test(0), "the healthy member's object"
    time.sleep(2 * QUICK.load_s)
    pending = [b for b in map(client.adapter.query_load_result, tasks) if b is not None]
    assert pending == [], "the kernel still owns that buffer"
    assert "memory0 is suspect" in " ".join(client.adapter.report_status()["problems"])
    release(members)
    client.wait(client.adapter.get_load_event_fd())
    late = [b for b in map(client.adapter.query_load_result, tasks) if b is not None]
    assert len(late) == 1
    client.adapter.close()


def test_close_keeps_its_deadline_while_everything_hangs() -> None:
    members = gated_members(4, 4 << 20)
    client = threaded_adapter(members, QUICK.model_copy(update={"stuck_io_s": 300.0}), readers=8)
    client.store(keys(8), [memory_obj(payload(n, SIZE)) for n in range(8)])
    shut(members)
    objects = [memory_obj(SIZE) for _ in range(8)]
    for number in range(8):
        client.adapter.submit_load_task(keys(1, number), [objects[number]])
        client.adapter.submit_store_task([key(100 + number)], [memory_obj(SIZE)])
    closer = threading.Thread(target=client.adapter.close)
    closer.start()
    closer.join(QUICK.close_s + 2.0)
    assert not closer.is_alive()
    release(members)  # what comes back now must not touch a closed descriptor


def test_late_completions_do_not_touch_closed_descriptors() -> None:
    members = gated_members(1, 1 << 20)
    client = threaded_adapter(members, QUICK)
    adapter = client.adapter
    client.store(keys(1), [memory_obj(payload(0, SIZE))])
    numbers = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    shut(members)
    adapter.submit_load_task(keys(1), [memory_obj(SIZE)])
    adapter.submit_store_task([key(1)], [memory_obj(SIZE)])
    adapter.close()
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in numbers]
    assert set(others) == numbers, "somebody else has the descriptors now"
    release(members)
    adapter.submit_lookup_and_lock_task(keys(1), {})
    time.sleep(0.2)
    for other in others:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)


def test_a_load_stuck_in_the_kernel_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    members = gated_members(2, 1 << 20)
    ended = threading.Event()
    client = threaded_adapter(members, QUICK, terminate=ended.set)
    client.store(keys(1), [memory_obj(payload(0, 2 * SIZE))])
    shut(members)
    client.adapter.submit_load_task(keys(1), [memory_obj(2 * SIZE)])
    assert ended.wait(30)
    said = next(r for r in caplog.records if r.levelno == logging.CRITICAL).message
    assert "memory" in said
    assert "nvme reset" in said
    status = client.adapter.report_status()
    assert status["is_healthy"] is False
    assert "stuck in the kernel" in " ".join(status["problems"])
    release(members)
    client.adapter.close()


@pytest.mark.parametrize(("handler", "code"), [("SIG_DFL", -signal.SIGTERM), ("SIG_IGN", 1)])
def test_the_process_ends_politely_or_in_any_case(handler: str, code: int) -> None:
    script = f"""
import signal
from fx100_lmcache.lmcache.mp import stuck
signal.signal(signal.SIGTERM, signal.{handler})
stuck.EXIT_GRACE_S = 0.1
stuck.terminate_process()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, check=False)
    assert done.returncode == code


def test_slow_but_living_loads_end_nothing() -> None:
    members = gated_members(1, 1 << 20)
    ended = threading.Event()
    client = threaded_adapter(members, QUICK, terminate=ended.set)
    client.store(keys(1), [memory_obj(payload(0, SIZE))])
    for _ in range(8):
        assert client.load(keys(1), [memory_obj(SIZE)]) == [True]
        time.sleep(QUICK.stuck_io_s / 4)
    assert not ended.is_set()
    client.adapter.close()


def test_the_capacity_is_a_hard_limit(tmp_path: Path) -> None:
    listener = Recorder()
    with opened(write_config(tmp_path, members=2, size="4MiB")) as client:
        client.adapter.register_listener(listener)
        capacity = client.adapter.get_usage().total_capacity_bytes
        sizes = [CHUNK_BYTES, 4096, 40_000, 2 * CHUNK_BYTES]
        for start in range(0, 400, 4):
            objects = [memory_obj(payload(start + n, size)) for n, size in enumerate(sizes)]
            client.store(keys(4, start), objects)
            assert client.usage() <= capacity
            blocks = client.adapter.report_status()["blocks"]
            assert blocks["free"] + blocks["used"] + blocks["quarantined"] == blocks["total"]
        client.settle()
        found = {one for one in keys(400) if client.has(one)}
        assert found == set(listener.present)
        for one in list(found)[:20]:
            number = int.from_bytes(one.chunk_hash, "little")
            obj = memory_obj(sizes[number % 4])
            assert client.get(one, obj) == payload(number, sizes[number % 4])
    assert sum(path.stat().st_size for path in tmp_path.glob("m?")) == 2 * (4 << 20)


def test_a_full_device_evicts_and_goes_on() -> None:
    rig = Rig.fresh(2, 512 * 1024)
    client = adapter_on(rig)
    failures = 0
    for number in range(500):
        stored = client.store(keys(1, number), [memory_obj(payload(number, SIZE))])
        failures += not stored.is_successful()
    assert failures == 0
    obj = memory_obj(SIZE)
    assert client.get(key(499), obj) == payload(499, SIZE)


def test_when_all_is_locked_a_store_is_dropped_and_reads_go_on() -> None:
    rig = Rig.fresh(2, 512 * 1024)
    client = adapter_on(rig)
    kept = []
    for number in range(500):
        stored = client.store(keys(1, number), [memory_obj(payload(number, SIZE))])
        if not stored.is_successful():
            break
        assert client.lookup(keys(1, number)) == [True]
        kept.append(number)
    assert 50 < len(kept) < 500
    assert rig.store.counts()["put_drop_full"] == 1
    for number in kept:
        assert client.get(key(number), memory_obj(SIZE)) == payload(number, SIZE)
    client.adapter.submit_unlock([key(number) for number in kept])
    assert client.store([key(1000)], [memory_obj(payload(1000, SIZE))]).is_successful()


def test_a_full_write_queue_drops_and_counts(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, io={"max_write_in_flight": "1MiB", "writer_threads": 1, "reader_threads": 1}
    )
    with opened(path) as client:
        objects = [memory_obj(payload(n, CHUNK_BYTES)) for n in range(64)]
        result = client.store(keys(64), objects)
        dropped = client.adapter.report_status()["counts"].get("put_drop_backlog", 0)
        assert result.is_successful() == (dropped == 0)
        found = [n for n in range(64) if client.has(key(n))]
        assert len(found) == 64 - dropped
        for number in found:
            got = client.get(key(number), objects[number])
            assert got == payload(number, CHUNK_BYTES)


def test_an_object_that_cannot_be_sized_is_a_miss_and_no_hang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """LMCache's object may raise; its request must still hear of the end."""
    caplog.set_level(logging.INFO, "fx100_lmcache")
    client = adapter_on(Rig.fresh(2, 512 * 1024))
    client.store([key(1)], [memory_obj(payload(1, SIZE))])
    target = memory_obj(bytes(SIZE))

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(target, name)

        sizes = 0

        def get_size(self) -> int:
            Broken.sizes += 1
            if Broken.sizes > 1:  # once when it is submitted
                raise RuntimeError("freed meanwhile")
            return SIZE

    assert client.load([key(1)], [Broken()]) == [False]
    assert "is reported as a miss" in caplog.text
