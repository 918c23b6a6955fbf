"""Plots of results, as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def bars(
    rows: Sequence[dict[str, Any]], series: str, x: str, y: str, title: str, path: Path
) -> None:
    """Draw ``y`` over ``x``, one bar for each value of ``series``."""
    axes, figure = _axes(title, x, y)
    names = list(dict.fromkeys(row[series] for row in rows))
    places = list(dict.fromkeys(row[x] for row in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = {row[x]: row[y] for row in rows if row[series] == name}
        at = [index + (number - (len(names) - 1) / 2) * width for index in range(len(places))]
        axes.bar(at, [mine.get(place, 0) for place in places], width, label=name)
    axes.set_xticks(range(len(places)), [str(place) for place in places])
    _save(axes, figure, path)


def lines(
    rows: Sequence[dict[str, Any]],
    series: str,
    x: str,
    y: str,
    title: str,
    path: Path,
    *,
    log: bool = False,
) -> None:
    """Draw ``y`` over ``x``, one line for each value of ``series``; ``log`` scales both axes."""
    axes, figure = _axes(title, x, y)
    for name in dict.fromkeys(row[series] for row in rows):
        mine = [(row[x], row[y]) for row in rows if row[series] == name]
        axes.plot(*zip(*mine, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=10 if log else 2)
    if log:
        axes.set_yscale("log")
    _save(axes, figure, path)


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return axes, figure


def _save(axes: Any, figure: Any, path: Path) -> None:
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
