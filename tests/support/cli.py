"""What the tests of the command line share: small volumes on files, and a process that owns one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from fx100_lmcache.buffers import IoBuffer, zero_buffer
from fx100_lmcache.cli import app
from fx100_lmcache.config import load
from fx100_lmcache.mount import Mounted, mount
from fx100_lmcache.ondisk.geometry import CLAIM_BYTES, LABEL_BYTES
from fx100_lmcache.store import LoadItem, PutItem
from fx100_lmcache.testing.harness import META, digest_of, value_of

MIB = 1 << 20
FX100 = (sys.executable, "-c", "from fx100_lmcache.cli import main; main()")


def fx100(*arguments: object, answer: str = "") -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=answer)


def fx100_process(
    *arguments: object, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [*prefix, *FX100, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@dataclass
class Rig:
    """A configuration file with members of a few MiB next to it."""

    config: Path
    members: list[Path]

    def load(self) -> Any:
        return load(self.config)

    def contents(self) -> dict[Path, bytes | None]:
        """Every byte of every member; None for what does not exist or is no file."""
        return {p: p.read_bytes() if p.is_file() else None for p in self.members}

    def unclaimed(self) -> dict[Path, bytes]:
        """What a living owner of the only shard does not renew: all but its claim blocks."""
        return {
            path: data[:LABEL_BYTES] + data[LABEL_BYTES + 2 * CLAIM_BYTES :]
            for path, data in self.contents().items()
            if data is not None
        }

    def status(self) -> dict[str, Any]:
        return json.loads(fx100("status", self.config, "--json").stdout)

    def rewrite(self, members: Sequence[Path | Mapping[str, Any]], **sections: Any) -> None:
        """Write the configuration anew with other members."""
        self.members = [m if isinstance(m, Path) else Path(m["path"]) for m in members]
        write_config(self.config, members, **sections)


def write_config(path: Path, members: Sequence[Path | Mapping[str, Any]], **sections: Any) -> None:
    listed = [{"path": str(m)} if isinstance(m, Path) else dict(m) for m in members]
    volume = {"members": listed, "object": "256KiB", **sections.pop("volume", {})}
    path.write_text(yaml.safe_dump({"volume": volume, **sections}))


def formatted(directory: Path, count: int = 2, size: str = "4MiB", **sections: Any) -> Rig:
    """Format a volume of new files through the command line."""
    rig = planned(directory, count, size, **sections)
    result = fx100("format", rig.config, "--yes")
    assert result.exit_code == 0, result.output
    return rig


def planned(directory: Path, count: int = 2, size: str = "4MiB", **sections: Any) -> Rig:
    """Write a configuration of files that do not exist yet."""
    directory.mkdir(parents=True, exist_ok=True)
    members = [directory / f"member-{number}" for number in range(count)]
    config = directory / "fx100.yaml"
    write_config(config, [{"path": str(m), "size": size} for m in members], **sections)
    return Rig(config, members)


def put(mounted: Mounted, name: str, data: bytes) -> str:
    """Store one object; return ``stored`` or the reason why not."""
    done = Event()
    results: list[Any] = []

    def finish(result: list[Any]) -> None:
        results.extend(result)
        done.set()

    mounted.store.put([PutItem(digest_of(name), META, _buffer(data))], finish)
    assert done.wait(60)
    return "stored" if results[0].stored else results[0].reason


def get(mounted: Mounted, name: str, length: int) -> bytes | None:
    """Load one object; None is a miss."""
    done = Event()
    results: list[Any] = []

    def finish(result: list[Any]) -> None:
        results.extend(result)
        done.set()

    buffer = _buffer(bytes(length))
    mounted.store.load([LoadItem(digest_of(name), buffer, lambda _m, _n: True)], finish)
    assert done.wait(60)
    return bytes(buffer.view[: results[0].length]) if results[0].length else None


def _buffer(data: bytes) -> IoBuffer:
    buffer = zero_buffer(max(4096, -(-len(data) // 4096) * 4096))
    buffer.view[: len(data)] = data
    buffer.length = len(data)
    return buffer


def fill(rig: Rig, names: Iterable[str], length: int = 200_000) -> None:
    """Store objects through a store of our own, and close it."""
    mounted = mount(rig.load())
    for name in names:
        assert put(mounted, name, value_of(name, 1, length)) == "stored"
    assert mounted.close() == 0


class Owner:
    """A process that opens a volume and does as it is told."""

    def __init__(self, config: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.owner", str(config), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.opened = self._answer()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, *words: object) -> Any:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or '"died"')

    def kill(self) -> None:
        """End it with SIGKILL, as often as one likes."""
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
