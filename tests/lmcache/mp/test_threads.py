"""Many threads, tiny pools: every byte is the right one, or it is a miss."""

import random
import threading
import time
from pathlib import Path

from lmcache.v1.distributed.api import ObjectKey

from support.l2 import MODEL, Client, bytes_of, key, memory_obj, opened, payload, write_config

THREADS = 32
KEYS = 200
ROUNDS = 60
SIZES = [512, 4096, 65_536, 70_000, 131_072 + 34]


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def collect(client: Client, results: dict[int, object], stop: threading.Event) -> None:
    """Do what LMCache's controller does: one thread pops, for all."""
    while not stop.is_set():
        results.update(client.adapter.pop_completed_store_tasks())
        time.sleep(0.001)


def test_32_threads_with_tiny_pools_never_see_foreign_bytes(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        size="2MiB",
        io={"max_write_in_flight": "1MiB", "reader_threads": 1, "writer_threads": 1},
    )
    wrong: list[object] = []
    hits = [0] * THREADS
    stores: dict[int, object] = {}
    stop = threading.Event()
    with opened(path) as client:
        adapter = client.adapter

        def use(which: int, dice: random.Random, one: ObjectKey, number: int) -> None:
            size = size_of(number)
            what = dice.random()
            if what < 0.4:
                # small sizes are off alignment, so that bounce buffers are used too
                obj = memory_obj(payload(number, size), offset=dice.choice([0, 0, 64]))
                task = adapter.submit_store_task([one], [obj])
                while task not in stores and not stop.is_set():
                    time.sleep(0.001)
            elif what < 0.95:
                obj = memory_obj(size, offset=dice.choice([0, 0, 64]))
                task = adapter.submit_load_task([one], [obj])
                while (bitmap := adapter.query_load_result(task)) is None:
                    time.sleep(0.001)
                if bitmap.test(0):
                    hits[which] += 1
                    if bytes_of(obj) != payload(number, size):
                        wrong.append((which, number))
            else:
                adapter.delete([one])

        def work(which: int) -> None:
            try:
                dice = random.Random(which)
                for _ in range(ROUNDS):
                    number = dice.randrange(KEYS)
                    use(which, dice, key(number, model_name=MODEL), number)
            except BaseException as problem:
                wrong.append(problem)
                raise

        collector = threading.Thread(target=collect, args=(client, stores, stop))
        collector.start()
        threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        stop.set()
        collector.join(10)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert sum(hits) > 10
        client.settle()
        status = adapter.report_status()
        assert status["is_healthy"], status["problems"]
        assert client.usage() == status["live_bytes"]
        assert status["counts"].get("checksum_failures", 0) == 0
