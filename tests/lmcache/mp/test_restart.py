"""A process that dies, and the next one: what was acknowledged is there, byte for byte."""

import itertools
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from support.l2 import (
    CHUNK_BYTES,
    Recorder,
    bytes_of,
    key,
    keys,
    memory_obj,
    opened,
    payload,
    write_config,
)

CHUNKS = 118


@contextmanager
def child(config: Path, first: int, count: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-m", "support.restart_child", str(config)]
    process = subprocess.Popen(
        [*command, str(first), str(count)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def acknowledged(process: subprocess.Popen[str], limit: int | None = None) -> list[int]:
    """Read what is acknowledged, up to a number or until all is said."""
    acks = []
    assert process.stdout is not None
    for line in itertools.islice(process.stdout, limit):
        if line.startswith("ack") and line.endswith("\n"):  # the kill may cut the last one short
            acks.append(int(line.split()[1]))
        elif line == "done\n":
            break
    return acks


def check(config: Path, numbers: list[int]) -> None:
    asked = [key(number) for number in numbers]
    with opened(config) as client:
        assert all(client.lookup(asked))
        objects = [memory_obj(CHUNK_BYTES) for _ in asked]
        assert all(client.load(asked, objects))
        for number, obj in zip(numbers, objects, strict=True):
            assert bytes_of(obj) == payload(number, CHUNK_BYTES)


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, list[int]]:
    """A volume whose owner was killed after its last acknowledgement."""
    config = write_config(tmp_path)
    with child(config, 0, CHUNKS) as process:
        acks = acknowledged(process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    assert sorted(acks) == list(range(CHUNKS))
    return config, acks


def test_every_acknowledged_chunk_survives_sigkill(killed: tuple[Path, list[int]]) -> None:
    check(*killed)


def test_also_when_killed_in_the_middle(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with child(config, 0, CHUNKS) as process:
        acks = acknowledged(process, 20)
        process.send_signal(signal.SIGKILL)
        acks += acknowledged(process)
    assert len(acks) >= 20
    check(config, acks)


def test_members_in_another_order_under_other_paths(
    killed: tuple[Path, list[int]], tmp_path: Path
) -> None:
    config, acks = killed
    written = yaml.safe_load(config.read_text())
    members = written["volume"]["members"]
    (tmp_path / "elsewhere").mkdir()
    for number, member in enumerate(members):
        moved = tmp_path / "elsewhere" / f"disk{(number * 3 + 1) % len(members)}"
        shutil.move(member["path"], moved)
        member["path"] = str(moved)
    written["volume"]["members"] = members[2:] + members[:2][::-1]
    config.write_text(yaml.safe_dump(written))
    check(config, acks)


def test_with_every_other_file_deleted(killed: tuple[Path, list[int]], tmp_path: Path) -> None:
    config, acks = killed
    text = config.read_text()
    members = {Path(m["path"]) for m in yaml.safe_load(text)["volume"]["members"]}
    for path in tmp_path.rglob("*"):
        if path not in members and not path.is_dir():
            path.unlink()
    new_home = tmp_path / "new"
    new_home.mkdir()
    (new_home / "other-name.yaml").write_text(text)
    check(new_home / "other-name.yaml", acks)


def test_usage_listeners_and_pages_after_sigkill(killed: tuple[Path, list[int]]) -> None:
    config, acks = killed
    with opened(config) as client:
        assert client.usage() == len(acks) * CHUNK_BYTES
        listener = Recorder()
        client.adapter.register_listener(listener)
        while client.adapter.report_status()["listeners_catching_up"]:
            client.settle()
        assert set(listener.present) == {key(number) for number in acks}
        page = client.adapter.list_l2_keys(page_size=1000)
        assert {entry.key.to_object_key() for entry in page.entries} == set(listener.present)


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    before = set(Path("/dev/shm").iterdir())
    acks: list[int] = []
    for cycle in range(3):
        with child(config, cycle * 10, 10) as process:
            acks += acknowledged(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert len(acks) == 30
    left = [p.name for p in set(Path("/dev/shm").iterdir()) - before if "fx100" in p.name]
    assert [n for n in left if not n.startswith("fx100-test-")] == []  # those are other tests' own
    check(config, acks)


def test_opening_and_closing_leaks_neither_descriptors_nor_threads(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    others = set(threading.enumerate())  # what earlier tests of this process left is not ours
    counts = []
    for cycle in range(6):
        with opened(config) as client:
            client.store(keys(2, cycle * 2), [memory_obj(CHUNK_BYTES) for _ in range(2)])
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith("fx100"):
                thread.join(10)
        left = set(threading.enumerate()) - others
        threads = [thread.name for thread in left if thread.name.startswith("fx100")]
        counts.append((len(list(Path("/proc/self/fd").iterdir())), threads))
    assert counts[-1][1] == []
    assert counts[-1] == counts[1], "the first cycle loads libraries"
