from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

pytest.importorskip("httpx", reason="needs the httpx package (extra cpu or gpu)")

from demo import __main__ as cli
from demo import report
from demo.scenario import Options

GOOD = report.Result(
    device="cpu",
    store_name="fx100",
    session_tokens=29_800,
    prompt_tokens=30_016,
    session_ttft_s=(5.0,),
    stored_chunks=118,
    computed_ttft_s=20.0,
    store_ttft_s=0.5,
    served_tokens=29_696,
    cached_tokens=29_696,
    read_bytes=None,
    identical=True,
)
Run = Callable[..., report.Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line with `run` in place of the scenario, and no signal handlers."""

    def call(run: Run, *arguments: str) -> Result:
        monkeypatch.setattr(cli, "run", run)
        monkeypatch.setattr(cli, "stop_like_ctrl_c", lambda: None)
        monkeypatch.setattr(cli, "check_shared_memory", lambda _device: None)
        app = typer.Typer()
        app.command()(cli.demo)
        return CliRunner().invoke(app, arguments)

    return call


def test_success_writes_json_and_removes_the_directory(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    seen: list[Options] = []

    def run(options: Options, *_rest: object) -> report.Result:
        (options.directory / "log").write_text("x")
        seen.append(options)
        return GOOD

    place, json_file = tmp_path / "place", tmp_path / "result.json"
    arguments = ("--directory", str(place), "--json", str(json_file), "--vllm-port", "8123")
    assert invoke(run, *arguments).exit_code == 0
    (options,) = seen
    assert options.session_tokens == 29_800
    assert options.ports.vllm == 8123
    assert len({options.ports.vllm, options.ports.lmcache, options.ports.lmcache_http}) == 3
    assert not place.exists()
    assert not options.sockets.exists()
    assert json_file.exists()


def test_keep_keeps_and_the_next_run_starts_afresh(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    def run(options: Options, *_rest: object) -> report.Result:
        assert not (options.directory / "log").exists()
        (options.directory / "log").write_text("x")
        return GOOD

    arguments = ("--directory", str(tmp_path / "place"), "--keep")
    assert invoke(run, *arguments).exit_code == 0
    assert (tmp_path / "place" / "log").exists()
    assert invoke(run, *arguments).exit_code == 0


def test_a_directory_of_others_is_not_touched(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "thesis").write_text("x")
    result = invoke(lambda *_arguments: GOOD, "--directory", str(tmp_path))
    assert result.exit_code == cli.EXIT_FAILED
    assert (tmp_path / "thesis").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("vLLM [died]"), cli.EXIT_FAILED),
        (KeyboardInterrupt(), cli.EXIT_INTERRUPTED),
    ],
)
def test_failures_and_ctrl_c_clean_up_and_set_the_exit_code(
    invoke: Callable[..., Result], tmp_path: Path, error: BaseException, code: int
) -> None:
    def run(*_arguments: object) -> report.Result:
        raise error

    assert invoke(run, "--directory", str(tmp_path / "place")).exit_code == code
    assert not (tmp_path / "place").exists()


def test_a_wrong_answer_sets_the_exit_code(invoke: Callable[..., Result], tmp_path: Path) -> None:
    wrong = report.Result(**{**vars(GOOD), "identical": False})
    result = invoke(lambda *_arguments: wrong, "--directory", str(tmp_path / "place"))
    assert result.exit_code == cli.EXIT_FAILED


def test_a_length_out_of_range_is_refused(invoke: Callable[..., Result], tmp_path: Path) -> None:
    arguments = ("--tokens", "100", "--directory", str(tmp_path / "place"))
    assert invoke(lambda *_arguments: GOOD, *arguments).exit_code == 2
