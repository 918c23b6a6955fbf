"""A process that opens one shard, stores an object and shows metrics until its input ends."""

import sys
import threading
from pathlib import Path

from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.config import load
from fx100_lmcache.metrics import publish
from fx100_lmcache.mount import mount
from fx100_lmcache.store import PutItem
from fx100_lmcache.testing.harness import META, digest_of

worker = sys.argv[2]
mounted = mount(load(Path(sys.argv[1])), shards=[int(worker)])
metrics = publish(
    mounted.store.status,
    mounted.config.metrics,
    role="worker",
    volume="of-the-test",
    shard=worker,
    model_name="model",
    worker_id=worker,
)
assert metrics is not None
stored = threading.Event()
mounted.store.put(
    [PutItem(digest_of(f"of {worker}"), META, zero_buffer(4096))], lambda _: stored.set()
)
assert stored.wait(30)
metrics.update()
print("ready", flush=True)
sys.stdin.read()
metrics.close()
mounted.close()
