import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.members.base import Member
from fx100_lmcache.testing.inline import inline_engine
from fx100_lmcache.testing.memory import MemoryMember
from support.engine import MIB, MakeEngine, file_member, needs_native


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines with threads; all are closed at the end."""
    made: list[LaneEngine] = []

    def make(members: list[Member], **options: object) -> LaneEngine:
        probe = options.pop("probe", None)
        settings = {"reader_threads": 8, "probe_interval_s": 0.05, "native": False} | options
        engine = LaneEngine(members, EngineOptions(**settings), probe)  # type: ignore[arg-type]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close(1.0)


@pytest.fixture(
    params=[
        "inline",
        "python-disk",
        "python-shm",
        pytest.param("native-disk", marks=needs_native),
        pytest.param("native-shm", marks=needs_native),
    ]
)
def setup(
    request: pytest.FixtureRequest, tmp_path: Path, make_engine: MakeEngine
) -> Iterator[Callable[..., LaneEngine]]:
    """Make an engine of one kind over one or more members of its kind."""
    lanes, _, where = request.param.partition("-")
    names = itertools.count()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-members-") as shm:
        folder = Path(shm) if where == "shm" else tmp_path
        opened = []

        def make(members: int = 1, size_bytes: int = 8 * MIB, **options: int) -> LaneEngine:
            if lanes == "inline":
                memory = [MemoryMember(size_bytes, index=i) for i in range(members)]
                return inline_engine(memory, **options)[0]
            files = [
                file_member(folder / f"member{next(names)}", size_bytes) for _ in range(members)
            ]
            opened.extend(files)
            engine = make_engine(files, native=lanes == "native", **options)
            assert engine.kind == lanes
            return engine

        yield functools.partial(make)
        for member in opened:
            member.close()
