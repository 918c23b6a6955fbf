"""Real namespaces that promise more space than their array has."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.nvmf.plan import HostIdentity
from support.nvmet_store import MIB, Array, get, promised, put, state_of, wait_until
from support.nvmet_target import BACKING, Target, sh

SPACE = 24 * MIB
BALLAST = 6 * MIB
OBJECTS = 300  # of 256 KiB each: three times what there is space for


@pytest.fixture
def pool() -> Iterator[Any]:
    """What the namespaces share; its ballast is what others use of it."""
    folder = BACKING / "fx100-lab-pool"
    folder.mkdir()
    sh("mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", str(folder))
    (folder / "ballast").write_bytes(bytes(BALLAST))
    yield folder
    (folder / "ballast").unlink(missing_ok=True)
    sh("umount", str(folder))
    folder.rmdir()


def test_thin_namespaces_go_on_when_the_array_is_full(
    pool: Path, target: Target, host: HostIdentity, tmp_path: Path
) -> None:
    """Reads go on, space is used again by eviction; when the array has some again, all is used."""
    array = Array(target, host, tmp_path)
    for _ in range(2):
        array.add(64 * MIB, thin=pool)
    array.configure()
    array.connect()
    array.format()
    with array.mounted() as mounted:
        names = [f"object-{number}" for number in range(OBJECTS)]
        outcomes = Counter(put(mounted, name).outcome for name in names)
        # of a write that found space for a part of it, Linux' target makes an I/O error
        assert set(outcomes) - {"error"} == {"stored", "no_space_below"}, outcomes
        assert outcomes["error"] <= 4, outcomes
        assert outcomes["no_space_below"] < OBJECTS / 5, outcomes
        assert [state_of(mounted, member) for member in range(2)] == ["up", "up"]
        problems = mounted.store.problems()
        assert problems
        assert all("no space below" in problem for problem in problems)
        there = promised(mounted, names)
        assert len(there) > 30
        assert {get(mounted, name).outcome for name in there} == {"hit"}
        assert names[-1] in there
        (pool / "ballast").unlink()
        healthy_s = wait_until("the store is healthy", lambda: not mounted.store.problems())
        assert put(mounted, "last").outcome == "stored"
        print(f"{dict(outcomes)}, {len(there)} there, healthy after {healthy_s:.1f} s")
    with array.mounted() as again:
        still = promised(again, names)
        assert len(still) >= len(there) - 1
        assert {get(again, name).outcome for name in still} == {"hit"}
