"""`fx100 verify`: every piece is read back, and what is bad is named."""

import json
from collections.abc import Callable, Iterator, Sequence

import pytest

from fx100_lmcache.admin import scrub
from fx100_lmcache.admin.scrub import Scrubber, ScrubResult
from fx100_lmcache.buffers import zero_buffer
from fx100_lmcache.engine.engine import LaneEngine
from fx100_lmcache.engine.member_slot import EngineOptions
from fx100_lmcache.errors import VolumeError
from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.geometry import LABEL_BYTES
from fx100_lmcache.ondisk.location import unpack_location
from fx100_lmcache.testing.harness import Rig as MemoryRig
from fx100_lmcache.testing.harness import digest_of, value_of
from fx100_lmcache.testing.memory import Fault, MemoryMember
from fx100_lmcache.volume.recovery import Recovered, recover
from fx100_lmcache.volume.volume import Volume, assemble
from support.cli import MIB, Owner, Rig, fill, fx100


def test_all_good(rig: Rig) -> None:
    fill(rig, [f"k{n}" for n in range(8)])
    result = fx100("verify", rig.config, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {
        *("ok", "volume", "entries", "pieces", "read_bytes", "gone", "seconds", "torn_inodes"),
        *("damaged_labels", "unreadable_inodes", "dropped_inodes", "bad"),
    }
    assert found["ok"]
    assert found["entries"] == 8
    assert found["read_bytes"] == 8 * 200_000
    help_text = " ".join(fx100("verify", "--help").stdout.replace("│", "").split())
    assert all(name in help_text for name in found)
    assert "all good" in fx100("verify", rig.config).stdout


def test_an_empty_volume(rig: Rig) -> None:
    assert fx100("verify", rig.config).exit_code == 0


@pytest.mark.parametrize("name", ["k0", "k5"])
def test_a_flipped_bit_is_found_and_named(rig: Rig, name: str) -> None:
    fill(rig, [f"k{n}" for n in range(8)])
    needle = value_of(name, 1, 200_000)[:64]
    [member] = [m for m in rig.members if needle in m.read_bytes()]
    offset = member.read_bytes().index(needle)
    with member.open("r+b") as stream:
        stream.seek(offset + 5)
        stream.write(b"\x00")
    before = rig.contents()
    result = fx100("verify", rig.config, "--json")
    assert result.exit_code == 1
    [bad] = json.loads(result.stdout)["bad"]
    assert bad["digest"] == digest_of(name).hex()
    assert (bad["member"], bad["offset"]) == (str(member), offset)
    assert bad["reason"] == "checksum does not match"
    text = fx100("verify", rig.config)
    assert text.exit_code == 1
    assert f"at byte {offset}" in text.stdout
    assert rig.contents() == before


def test_beside_a_living_server(rig: Rig, owner: Callable[..., Owner]) -> None:
    server = owner(rig.config)
    assert server.tell("store", "a", 200_000) == "stored"
    assert fx100("verify", rig.config).exit_code == 0
    server.tell("churn", 200_000)
    for _ in range(5):
        result = fx100("verify", rig.config)
        assert result.exit_code == 0, result.output


# ----- the scrubber on memory members with faults


@pytest.fixture
def engines() -> Iterator[list[LaneEngine]]:
    made: list[LaneEngine] = []
    yield made
    for engine in made:
        engine.close(1.0)


def read_all(volume: Volume) -> Recovered:
    return recover(volume.members, volume.geometry, volume.uuid, {0: 1})


def scrubbed(
    engines: list[LaneEngine],
    members: Sequence[MemoryMember],
    found: Recovered | None = None,
    answers: bool = True,
) -> ScrubResult:
    volume = assemble(members)

    def probe(_: int, member: Member) -> Member | None:
        return member if answers else None

    options = EngineOptions(reader_threads=2, writer_threads=1, probe_interval_s=60)
    engines.append(LaneEngine(volume.members, options, probe))
    found = read_all(volume) if found is None else found
    total = [0]

    def progress(count: int) -> None:
        total[0] += count

    scrubber = Scrubber(volume, engines[-1], found, deadline_s=30.0)
    result = scrubber.run(progress)
    assert total[0] == scrubber.total_bytes
    return result


@pytest.fixture
def memory() -> MemoryRig:
    rig = MemoryRig.fresh(members=2, size_bytes=MIB)
    for n in range(10):
        assert rig.put(f"k{n}", value_of(f"k{n}", 1, 30_000)).stored
    return rig


def test_several_in_flight_in_bounded_memory(
    memory: MemoryRig, engines: list[LaneEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = zero_buffer

    def counted(size: int) -> object:
        made.append(size)
        return real(size)

    monkeypatch.setattr(scrub, "zero_buffer", counted)
    monkeypatch.setattr(scrub, "MAX_IN_FLIGHT", 6)
    assert scrubbed(engines, memory.members).entries == 10
    assert len(made) == 6
    monkeypatch.setattr(scrub, "BUFFER_BYTES", 1)
    made.clear()
    assert scrubbed(engines, memory.members).bad == []
    assert len(made) == scrub.MIN_IN_FLIGHT


def test_what_was_evicted_meanwhile_is_not_bad(
    memory: MemoryRig, engines: list[LaneEngine]
) -> None:
    found = read_all(assemble(memory.members))
    memory.store.remove([digest_of("k3")])
    for n in range(80):  # take the room that k3 had, and evict others
        memory.put(f"new{n}", value_of(f"new{n}", 1, 30_000))
    result = scrubbed(engines, memory.members, found)
    assert result.gone > 0
    assert result.bad == []


def test_what_was_cleared_meanwhile_is_not_bad(
    memory: MemoryRig, engines: list[LaneEngine]
) -> None:
    volume = assemble(memory.members)
    found = read_all(volume)
    memory.store.clear()  # the inodes stay on the media, their blocks are used again
    member, block, _ = unpack_location(int(found.locations[3, 0]))
    offset = volume.geometry.block_offset(member, block)
    memory.members[member].media[offset : offset + 4096] = b"n" * 4096
    result = scrubbed(engines, memory.members, found)
    assert result.gone == 1
    assert result.bad == []


def test_a_glitch_is_read_again(memory: MemoryRig, engines: list[LaneEngine]) -> None:
    first = assemble(memory.members).geometry.block_offset(0, 0)
    glitch = Fault("flip", "read", value=9, first_byte=first, last_byte=MIB - LABEL_BYTES - 1)
    memory.members[0].faults.append(glitch)
    assert scrubbed(engines, memory.members).bad == []
    assert glitch.times == 0


def test_a_device_with_bad_places_is_read_to_its_end(
    memory: MemoryRig, engines: list[LaneEngine]
) -> None:
    first = assemble(memory.members).geometry.block_offset(0, 0)
    places = range(first, MIB - LABEL_BYTES, 4096)
    memory.members[0].faults += [
        Fault("error", "read", times=1000, first_byte=at, last_byte=at) for at in places
    ]
    result = scrubbed(engines, memory.members)
    on_first = [bad for bad in result.bad if bad.member == memory.members[0].name]
    assert len(on_first) == len(result.bad) > 3  # more than it takes to call a member down
    assert all("cannot be read" in bad.reason for bad in result.bad)
    found = read_all(assemble(memory.members))
    pieces = (found.locations >> 56 == 0) & (found.locations != 0)
    assert len(on_first) == pieces.sum()


def test_a_device_that_is_gone_ends_it(memory: MemoryRig, engines: list[LaneEngine]) -> None:
    first = assemble(memory.members).geometry.block_offset(0, 0)
    last = MIB - LABEL_BYTES - 1
    memory.members[0].faults.append(
        Fault("error", "read", times=1000, first_byte=first, last_byte=last)
    )
    for n in range(10, 20):
        memory.put(f"k{n}", value_of(f"k{n}", 1, 30_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scrub, "MAX_IN_FLIGHT", 4)
        with pytest.raises(VolumeError, match="memory0 does not answer any more"):
            scrubbed(engines, memory.members, answers=False)
