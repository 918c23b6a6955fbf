"""Each gate passes on a sound site, and fails when it should, naming the step."""

import json
from pathlib import Path
from typing import Any

import pytest

from demo.services import free_ports
from fx100_lmcache.accept import arrival, bench, devices, node, paths, serving, stability
from fx100_lmcache.accept import gate as gate_module
from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.steps import Outcome
from fx100_lmcache.config import load
from fx100_lmcache.mount import mount
from fx100_lmcache.nvmf.sysfs import Sysfs
from fx100_lmcache.testing.volumes import file_volume
from support.acceptance import Site
from support.fake_sysfs import NQN, FakeSysfs


def scratch(site: Site) -> Path:
    path = site.root / "scratch"
    path.write_bytes(bytes(1 << 20))
    return path


def test_g1_passes_on_a_sound_site(site: Site) -> None:
    done = site.accept("g1", "--destroy", scratch(site))
    assert done.exit_code == 0, done.output
    verdicts = site.verdicts("g1")
    assert verdicts[arrival.READ] == verdicts[arrival.WRITE] == "passed"
    assert verdicts[arrival.PULL] == verdicts[arrival.SMART] == "does not apply"


def test_g1_fails_on_a_slow_member(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = site.config.parent / "m1"
    monkeypatch.setenv("FAKE_SLOW_MEMBER", str(slow))
    done = site.accept("g1", "--destroy", scratch(site))
    assert done.exit_code == 1
    assert "failed: fio reads" in done.stdout
    [read] = [step for step in site.report("g1")["steps"] if step["name"] == arrival.READ]
    bad = [check["what"] for check in read["outcome"]["checks"] if check["passed"] is False]
    assert bad == [f"{slow} against the median member"]


def test_g1_only_reads_members(site: Site) -> None:
    site.accept("g1")
    lines = [each["line"] for step in site.report("g1")["steps"] for each in step["commands"]]
    assert len(lines) == 4
    assert all("--readonly" in line for line in lines)


def test_g1_without_fio_is_incomplete_and_names_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.programs / "fio").unlink()
    monkeypatch.setenv("PATH", str(site.programs))
    done = site.accept("g1", "--destroy", scratch(site))
    assert done.exit_code == 2
    assert "fio: not installed" in done.stdout
    assert "incomplete: not run: fio reads, fio writes" in done.stdout


def test_g1_without_a_scratch_is_incomplete(site: Site) -> None:
    done = site.accept("g1")
    assert done.exit_code == 2
    assert "--destroy names no scratch" in done.stdout


@pytest.fixture
def fabric(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSysfs:
    """The site's volume behind two paths of an array, as far as sysfs says."""
    wanted = {"subsystem_nqn": NQN, "addresses": [{"traddr": "10.0.0.1"}]}
    site.config = file_volume(
        tmp_path / "fabric",
        members=3,
        size="4MiB",
        volume={"object": "64KiB"},
        nvme={"subsystems": [wanted]},
    )
    sysfs = FakeSysfs(tmp_path / "sys")
    sysfs.subsystem()
    sysfs.controller("nvme0")
    sysfs.controller("nvme1", address="traddr=10.0.0.2,trsvcid=4420")
    site.program("nvme", 'print(\'{"mn": "FX100", "sn": "1", "fr": "1.0", "mdts": 8}\')')
    site.program("dd", "")
    monkeypatch.setattr(devices, "Sysfs", lambda _root: Sysfs(sysfs.root))
    monkeypatch.setattr(paths, "_SETTLE_S", 0.0)
    monkeypatch.setattr(paths, "_POLL_S", 0.05)
    return sysfs


def hook(site: Site, state: Path, *, comes_back: bool) -> Path:
    """Make a program that pulls nvme1, and may forget to return it."""
    text = (
        "import sys, pathlib\n"
        f"state = pathlib.Path({str(state)!r})\n"
        "if sys.argv[1] == 'list': print('port-2')\n"
        "if sys.argv[1] == 'down': state.write_text('connecting\\n')\n"
        f"if sys.argv[1] == 'up' and {comes_back}: state.write_text('live\\n')\n"
    )
    return site.program("pull", text)


@pytest.mark.parametrize("comes_back", [True, False])
def test_g1_fails_on_a_path_that_does_not_come_back(
    site: Site, fabric: FakeSysfs, comes_back: bool
) -> None:
    pull = hook(site, fabric.controllers / "nvme1" / "state", comes_back=comes_back)
    done = site.accept("g1", "--destroy", scratch(site), "--path-hook", pull)
    assert done.exit_code == (0 if comes_back else 1), done.output
    assert ("failed: pull every path" in done.stdout) is not comes_back


def test_g1_fails_when_reads_stop_with_one_of_two_paths(site: Site, fabric: FakeSysfs) -> None:
    state = fabric.controllers / "nvme1" / "state"
    pull = hook(site, state, comes_back=True)
    site.program("dd", f"import sys; sys.exit('connecting' in open({str(state)!r}).read())")
    done = site.accept("g1", "--destroy", scratch(site), "--path-hook", pull)
    assert done.exit_code == 1
    assert "port-2 pulled" in done.stdout


def test_g1_without_a_hook_does_not_pass_over_a_fabric(site: Site, fabric: FakeSysfs) -> None:
    done = site.accept("g1", "--destroy", scratch(site))
    assert done.exit_code == 2
    assert "incomplete: not run: pull every path" in done.stdout


def test_g1_fails_on_two_firmwares(site: Site, fabric: FakeSysfs) -> None:
    site.program("nvme", 'import sys; print(\'{"mn": "FX100", "fr": "%s"}\' % sys.argv[2])')
    done = site.accept("g1", "--destroy", scratch(site))
    assert done.exit_code == 1
    assert "firmware" in done.stdout


def test_g2_passes_and_leaves_nothing_in_the_volume(site: Site) -> None:
    done = site.accept("g2")
    assert done.exit_code == 0, done.output
    mounted = mount(load(site.config))
    assert len(mounted.store) == 0
    mounted.close()


def test_g2_fails_on_a_flipped_bit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gate_module.run_step

    def flip_before_loading(step: Any, made: Bench) -> Outcome:
        if step.name == node.LOAD:
            _flip_a_bit(site)
        return whole(step, made)

    monkeypatch.setattr(gate_module, "run_step", flip_before_loading)
    done = site.accept("g2")
    assert done.exit_code == 1
    assert "failed: load sessions" in done.stdout
    assert "objects that were misses: 1 of 8" in done.stdout


def _flip_a_bit(site: Site) -> None:
    mounted = mount(load(site.config))
    start = mounted.volume.geometry.block_offset(0, 0)
    mounted.close()
    with (site.config.parent / "m0").open("r+b") as file:
        file.seek(start + 100)
        byte = file.read(1)[0]
        file.seek(start + 100)
        file.write(bytes([byte ^ 1]))


def test_g2_fails_on_what_the_doctor_finds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"severity": "problem", "subject": "volume", "what": "is a teapot"}
    answer = (1, {"findings": [found], "bad": []})
    monkeypatch.setattr(Bench, "fx100", lambda *_, **__: answer)
    done = site.accept("g2")
    assert done.exit_code == 1
    assert "volume: is a teapot" in done.stdout


def test_g2_could_not_run_on_a_volume_in_use(site: Site) -> None:
    owner = mount(load(site.config))
    done = site.accept("g2")
    owner.close()
    assert done.exit_code == 2
    assert site.verdicts("g2")[node.STORE] == "not run"


def test_g2_does_not_store_what_could_evict_something(site: Site) -> None:
    site.set("g2", session="64MiB")
    done = site.accept("g2")
    assert done.exit_code == 2
    assert "fit beside what the volume holds" in done.stdout


def test_g4_passes_with_its_real_load(site: Site) -> None:
    site.set("g4", segment="2s", latency_growth=100)
    done = site.accept("g4")
    assert done.exit_code == 0, done.output
    second = site.report("g4")["steps"][1]["outcome"]["checks"]
    assert ["stored, and gone after the kill", "0"] in [[c["what"], c["found"]] for c in second]


LOAD = """
import json, sys, time
extra = json.loads(sys.argv[1])
def say(**values): print(json.dumps(values), flush=True)
say(ready=time.monotonic(), lost=extra.get("lost", 0), wrong=0)
for at in range(40):
    say(at=time.monotonic(), memory_bytes=100_000_000 + at * extra.get("leak", 0),
        descriptors=20 + at * extra.get("open", 0), p50_ms=1.0,
        counts={"hits": 10, "misses": extra.get("misses", 0), "wrong": extra.get("wrong", 0)})
say(stored=7)
if extra.get("dies"): sys.exit("it broke")
time.sleep(60)
"""
"""A load that says what it is told to."""


@pytest.mark.parametrize(
    ("plant", "step", "check"),
    [
        ({"leak": 10_000_000}, "segment 1", "growth of memory"),
        ({"open": 2}, "segment 1", "growth of descriptors"),
        ({"wrong": 1}, "segment 1", "loads with other bytes: 40"),
        ({"misses": 1}, "segment 1", "misses of what is stored: 40"),
        ({"lost": 1}, "segment 2", "stored, and gone after the kill: 1"),
        ({"dies": 1}, "segment 1", "it broke"),
        ({}, "", "passed"),
    ],
)
def test_g4_fails_on_what_is_planted(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    plant: dict[str, int],
    step: str,
    check: str,
) -> None:
    program = site.program("load", LOAD)
    monkeypatch.setattr(bench, "LOAD", (str(program), json.dumps(plant)))
    done = site.accept("g4")
    assert done.exit_code == (1 if plant else 0), done.output
    assert check in done.stdout
    assert not plant or step in done.stdout.split("failed: ")[-1]


def test_g4_fails_on_a_path_that_does_not_come_back(
    site: Site, fabric: FakeSysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.set("g4", path_down="100ms", path_back="100ms")
    program = site.program("load", LOAD)
    monkeypatch.setattr(bench, "LOAD", (str(program), "{}"))
    pull = hook(site, fabric.controllers / "nvme1" / "state", comes_back=False)
    done = site.accept("g4", "--path-hook", pull)
    assert done.exit_code == 1
    assert "did not come back" in done.stdout
    assert "failed: segment 1" in done.stdout


def test_g4_looks_for_what_was_stored_before_a_kill(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = site.program("load", LOAD)
    monkeypatch.setattr(bench, "LOAD", (str(program), "{}"))
    site.accept("g4")
    assert json.loads((site.out("g4") / "raw" / "expected.json").read_text()) == [7]


SERVER = """
import http.server, sys
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
open(sys.argv[3], "a").write(sys.argv[2] + "\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ok).serve_forever()
"""
GENERATOR = """
import json, sys
prompts, count, result, arms, extra = sys.argv[1:6]
extra = json.loads(extra)
arm = open(arms).read().split()[-1]
lines = [json.loads(line)["prompt"] for line in open(prompts)]
slow = arm == "none"
ours = 1.0 if not extra.get("no_gain") else 10.0
texts = [line[:10] + ("!" if slow and extra.get("other") else "") for line in lines]
json.dump({"completed": len(lines) - extra.get("lost", 0), "ttfts": [10.0 if slow else ours] *
    len(lines), "generated_texts": texts, "errors": [], "total_input_tokens": 99,
    "output_throughput": 1.0 if slow else 11 - ours}, open(result, "w"))
"""


@pytest.mark.parametrize(
    ("plant", "code", "said"),
    [
        ({}, 0, "passed"),
        ({"no_gain": 1}, 1, "failed: gain"),
        ({"other": 1}, 1, "identical answers"),
        ({"lost": 1}, 1, "0 of 1 sessions were answered"),
    ],
)
def test_g3_compares_what_a_generator_measured(
    site: Site, plant: dict[str, int], code: int, said: str
) -> None:
    ports = free_ports(2)
    arms = site.root / "arms"
    server, generator = site.program("server", SERVER), site.program("generator", GENERATOR)
    urls = [f"http://127.0.0.1:{port}/" for port in ports]
    site.set(
        "g3",
        server=[str(server), str(ports[0]), "{store}", str(arms)],
        server_url=urls[0],
        inference=[str(server), str(ports[1]), "", "/dev/null"],
        inference_url=urls[1],
        generator=[
            *(str(generator), "{prompts}", "{count}", "{result}", str(arms)),
            json.dumps(plant),
        ],
        sessions=1,
        session_words=20,
        concurrency=[1],
        settle="100ms",
    )
    done = site.accept("g3")
    assert done.exit_code == code, done.output
    assert said in done.stdout
    if not plant:
        assert arms.read_text().split() == [str(site.config), str(site.config), "none"]


def test_g3_without_its_generator_is_incomplete(site: Site) -> None:
    site.set("g3", generator=["no-such-generator"])
    done = site.accept("g3")
    assert done.exit_code == 2
    assert "no-such-generator: not installed" in done.stdout


def test_prompts_of_returning_sessions_begin_as_before_and_share_nothing(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    serving.write_prompts(first, 0, 3, 50, 0)
    serving.write_prompts(again, 0, 3, 50, 10)
    before, after = (
        [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
        for file in (first, again)
    )
    assert all(new.startswith(old) and new != old for old, new in zip(before, after, strict=True))
    assert len({text[:8] for text in before}) == 3


def test_a_killed_segment_reads_up_to_the_line_that_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "segment.jsonl"
    lines = [{"ready": 3.0, "lost": 0, "wrong": 0}, {"stored": 1}, {"stored": 2}, {"removing": 1}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"stored": 3')
    found = stability.Segment(1.0)
    stability._read(file, found, [])
    assert (found.expected, found.ready_s) == ([2], 2.0)
