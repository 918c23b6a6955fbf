import os
from pathlib import Path
from typing import Any

import pytest

from fx100_lmcache.accept.bench import Bench
from support.acceptance import FIO, Site, make_site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with a fio that answers, and whose doctor, checks and scrub find nothing."""
    site = make_site(tmp_path)
    monkeypatch.setenv("PATH", f"{site.programs}{os.pathsep}{os.environ['PATH']}")
    site.program("fio", FIO)

    def clean(*_: Any, **__: Any) -> tuple[int, dict[str, Any]]:
        return 0, {"findings": [], "bad": []}

    monkeypatch.setattr(Bench, "fx100", clean)
    return site
