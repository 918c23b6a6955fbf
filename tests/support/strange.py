"""An object of which nothing can be had."""

from __future__ import annotations

from typing import Any


class Strange:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Any:
        raise RuntimeError("not to be listed")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("not to be called")
