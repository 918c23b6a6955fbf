"""Which rank works on which shard."""

import subprocess
import sys
from pathlib import Path

import pytest

from fx100_lmcache.errors import ClaimError
from support.inprocess import (
    CHUNK_TOKENS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    counts,
    fill,
    free,
    holds,
    key,
    keys,
    metadata,
    new_obj,
    plugin_on,
    put,
    refused,
    settle,
    write_config,
)

# ----- shards


def test_ranks_read_only_what_is_theirs(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=8, size="8MiB")
    ranks = [metadata(world_size=8, worker_id=rank) for rank in range(8)]
    for rank, told in enumerate(ranks):
        with plugin_on(path, told) as plugin:
            assert plugin._setup.shard == rank
            obj = new_obj(plugin.local_cpu_backend, 0)
            fill(obj, f"rank{rank}")
            plugin.batched_submit_put_task([key(1, like=told)], [obj])
            free([obj])
            settle(plugin)
    for rank, told in enumerate(ranks):
        with plugin_on(path, told) as plugin:
            assert len(plugin._store) == 1
            found = plugin.get_blocking(key(1, like=told))
            assert holds(found, f"rank{rank}")
            free([found])
    with plugin_on(path, metadata(world_size=4, worker_id=1)) as plugin:
        assert not plugin.contains(key(1, world_size=4, worker_id=1))


def test_two_tp4_instances_share_a_volume_of_eight_shards(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=8, size="16MiB")
    second = {"extra_config": {"fx100.shard_base": 4}}
    told = metadata(world_size=4, worker_id=3)
    with plugin_on(path, told) as one, plugin_on(path, told, **second) as other:
        assert (one._setup.shard, other._setup.shard) == (3, 7)
        put(one, [key(1, like=told)])
        assert not other.contains(key(1, like=told))


OWNER = """
import sys, time, warnings; warnings.simplefilter("ignore")
from pathlib import Path
from support.inprocess import plugin_on, put, keys
with plugin_on(Path(sys.argv[1])) as plugin:
    put(plugin, keys(3))
    print("open", flush=True)
    time.sleep(600)
"""


def test_a_busy_shard_is_refused_and_free_again_after_sigkill(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        while owner.stdout.readline().strip() != "open":
            assert owner.poll() is None
        with pytest.raises(ClaimError, match=f"in use.*{owner.pid}"), plugin_on(path):
            pass
    finally:
        owner.kill()
        owner.communicate()
    with plugin_on(path) as plugin:
        assert plugin.batched_contains(keys(3)) == 3


def test_ranks_on_one_volume_do_not_evict_each_other(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=2, members=1, size="4MiB")
    ranks = [metadata(world_size=2, worker_id=rank) for rank in range(2)]
    with plugin_on(path, ranks[0]) as one, plugin_on(path, ranks[1]) as other:
        total = one._store.capacity_bytes + other._store.capacity_bytes
        assert total < 4 << 20
        put(one, keys(10, like=ranks[0]))
        for start in range(0, 200, 20):
            put(other, keys(20, start, like=ranks[1]))
        assert counts(other)["evictions"] > 0
        assert one.batched_contains(keys(10, like=ranks[0])) == 10
    with plugin_on(path, ranks[0]) as one:
        assert one.batched_contains(keys(10, like=ranks[0])) == 10


def test_a_rank_without_a_shard_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=2)
    told = refused(path, metadata(world_size=4, worker_id=2))
    assert "needs shard 2" in told
    assert "volume.shards" in told
    assert "number" in refused(path, extra_config={"fx100.shard_base": "1"})


def test_replicas_of_data_parallelism_get_shards_of_their_own(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=4)
    told = metadata(world_size=2, worker_id=1, engine_id="uuid_dp1")
    with plugin_on(path, told) as plugin:
        assert plugin._setup.shard == 3


# ----- MLA


MLA = {"use_mla": True, "kv_shape": (LAYERS, 1, CHUNK_TOKENS, 1, HEADS * HEAD_SIZE)}


def test_mla_keeps_one_copy_on_the_first_rank(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=8)
    first = metadata(world_size=8, worker_id=0, **MLA)
    named = key(1, like=first, world_size=1)
    with plugin_on(path, first) as plugin:
        put(plugin, [named])
        assert plugin.contains(named)
    other = metadata(world_size=8, worker_id=1, **MLA)
    assert "lookup_server_worker_ids" in refused(path, other)


def test_mla_layer_by_layer_keeps_a_copy_on_every_rank(tmp_path: Path) -> None:
    path = write_config(tmp_path, shards=8)
    with plugin_on(path, metadata(world_size=8, worker_id=5, **MLA), use_layerwise=True) as plugin:
        assert plugin._setup.shard == 5
