"""docs/on-disk-format.md says what the code does: its tables are compared with the structs."""

import re
import struct

import pytest

from fx100_lmcache.config import load
from fx100_lmcache.ondisk import claim_block, geometry, inode, label, location
from fx100_lmcache.ondisk.reason import Reason
from fx100_lmcache.volume import verdict
from support import ROOT

DOC = (ROOT / "docs" / "on-disk-format.md").read_text()


def tables(heading: str) -> list[list[list[str]]]:
    """Return the tables below a heading, as rows of cells without their first two lines."""
    section = re.split(rf"^## {heading}$", DOC, flags=re.M)[1].split("\n## ")[0]
    found = re.findall(r"(?:^\|.*\|\n)+", section, flags=re.M)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
        for text in found
    ]


def places(rows: list[list[str]]) -> list[tuple[int, int]]:
    return [(int(row[0]), int(row[1])) for row in rows if row[1].isdigit()]


def fields(*formats: str) -> list[tuple[int, int]]:
    """Offset and size of every field of structs that follow each other."""
    found, at = [], 0
    for text in re.findall(r"\d+s|[A-Z]", "".join(formats)):
        size = struct.calcsize("<" + text)
        found.append((at, size))
        at += size
    assert at == sum(struct.calcsize(text) for text in formats)
    return found


def test_label() -> None:
    head, member = tables("Label")
    assert places(head) == fields(label._HEAD.format)
    assert places(member) == fields(label._MEMBER.format)
    assert label.MAGIC.decode() in head[1][2]
    assert head[2][2].endswith(str(label.VERSION))


def test_claim_block() -> None:
    [rows] = tables("Claim block")
    assert places(rows) == fields(claim_block._CLAIM.format)
    assert int(rows[-1][0]) == claim_block._CLAIM.size
    assert claim_block.MAGIC.decode() in rows[1][2]
    assert str(claim_block.HOLDER_BYTES) in rows[3][2]


def test_inode() -> None:
    head, piece = tables("Inode")
    assert places(head) == fields(inode._CHECKSUM.format, inode._HEAD.format)
    assert sum(size for _, size in places(head)) == inode.HEAD_BYTES
    assert places(piece) == fields(inode._PIECE.format)
    by_offset = {offset: row[2] for (offset, _), row in zip(places(head), head, strict=True)}
    dtype = inode._HEAD_DTYPE
    assert dtype.fields is not None
    words = {
        **{"checksum": "checksum", "magic": inode.MAGIC.decode(), "version": "version"},
        **{"used": "used", "volume": "volume UUID", "shard": "shard", "member": "member"},
        **{"slot": "slot", "generation": "generation", "pieces": "pieces", "meta": "metadata"},
        **{"epoch": "epoch", "counter": "counter", "digest": "digest", "length": "length"},
        **{"flags": "flags", "reserved": "reserved"},
    }
    assert set(words) == set(dtype.names or ())
    for name, word in words.items():
        assert word in by_offset[dtype.fields[name][1]], name
    assert location.unpack_location(location.pack_location(3, 5, 7)) == (3, 5, 7)
    assert location.pack_location(3, 5, 7) == 3 << 56 | 7 << 40 | 5


def test_places_on_a_member() -> None:
    config = load(ROOT / "configs" / "embedded.yaml").volume
    g = geometry.plan_geometry(
        [member.size_bytes or 0 for member in config.members],
        object_bytes=config.object_bytes,
        shards=config.shards,
        inode_bytes=config.inode_bytes,
        bytes_per_inode=config.bytes_per_inode,
        io_align_bytes=512,
    )
    [rows] = tables("A member")
    blocks = g.shard_blocks(0, 0)
    assert places([row[1:] for row in rows]) == [
        (0, geometry.LABEL_BYTES),
        (g.claim_offset(0, 0), geometry.CLAIM_BYTES),
        (g.claim_offset(0, 1), geometry.CLAIM_BYTES),
        (g.slot_offset(0, 0, 0), g.table_bytes(0)),
        (g.block_offset(0, 0), len(blocks) * g.block_bytes),
        (g.label_copy_offset(0), geometry.LABEL_BYTES),
    ]
    assert f"{g.members[0].slots_per_shard} slots" in rows[3][0]
    assert f"{g.members[0].frames_per_shard} frames" in rows[4][0]
    assert geometry.choose_frame_blocks(8_126_464, 4) == 62
    assert geometry.MAX_PIECE_BYTES == 8 << 20


def test_reasons() -> None:
    [rows] = tables("Recovery")
    assert [row[0].strip("`") for row in rows] == list(Reason)
    kept = {row[0].strip("`") for row in rows if row[2] == "kept"}
    assert kept == {Reason.FORMAT}
    assert {row[2] for row in rows} == {"kept", "erased"}
    by_reason = {row[0].strip("`"): row[1] for row in rows}
    assert f"{verdict.MAX_LOST_CLEARS:,} beyond" in by_reason[Reason.GENERATION]
    assert verdict.MAX_EPOCHS_AHEAD == 1 << 32
    assert claim_block.MAX_EPOCH == claim_block.MAX_COUNTER == 1 << 62
    assert geometry.MAX_OBJECT_BYTES == (1 << 32) - 1


@pytest.mark.parametrize(
    ("row", "value"),
    [
        (0, geometry.MAX_MEMBERS),
        (1, geometry.MAX_SHARDS),
        (2, geometry.MAX_FRAME_BLOCKS),
    ],
)
def test_limits(row: int, value: int) -> None:
    [rows] = tables("Limits")
    assert int(rows[row][1]) == value
