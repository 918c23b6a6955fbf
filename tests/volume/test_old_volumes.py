"""Volumes that earlier packages wrote still open, and nothing but their claims is written.

`fixtures/format-1-*` is a volume of two members with eight objects and one that was removed, made
by version 0.1.0 on members in memory: see `value_of` for what the objects hold.
"""

import gzip
import json
from pathlib import Path

import pytest

from fx100_lmcache.testing.harness import Rig, value_of
from fx100_lmcache.testing.memory import MemoryMember

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = ("format-1",)


def old_members(version: str) -> list[MemoryMember]:
    members = []
    for index, path in enumerate(sorted(FIXTURES.glob(f"{version}-member-*.gz"))):
        media = gzip.decompress(path.read_bytes())
        members.append(MemoryMember(len(media), index=index))
        members[-1].media[:] = media
    return members


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_volume_opens_with_all_that_it_holds(version: str) -> None:
    rig = Rig(old_members(version))
    rig.open()
    objects = json.loads((FIXTURES / f"{version}.json").read_text())
    for name, (number, length) in objects.items():
        assert rig.get(name) == value_of(name, number, length), name
    assert len(rig.store) == len(objects)
    assert rig.get("removed") is None


@pytest.mark.parametrize("version", VERSIONS)
def test_opening_and_reading_it_writes_its_claims_alone(version: str) -> None:
    rig = Rig(old_members(version))
    before = [bytes(member.media) for member in rig.members]
    rig.open()
    for name in json.loads((FIXTURES / f"{version}.json").read_text()):
        assert rig.get(name) is not None
    geometry = rig.store.volume.geometry
    rig.store.close()
    claims = slice(geometry.claim_offset(0, 0), geometry.table_offset)
    for member, old in zip(rig.members, before, strict=True):
        now = bytearray(member.media)
        assert now[claims] != old[claims]
        now[claims] = old[claims]
        assert bytes(now) == old


@pytest.mark.parametrize("version", VERSIONS)
def test_it_can_be_written_to_and_opened_again(version: str) -> None:
    rig = Rig(old_members(version))
    rig.open()
    assert rig.put("new", value_of("new", 1, 20_000)).stored
    rig.reopen()
    assert rig.get("new") == value_of("new", 1, 20_000)
    rig.check_space()
