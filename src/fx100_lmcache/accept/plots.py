"""Charts of the report as inline SVG, drawn by matplotlib where it is installed.

Text and axes take the page's own colour, so that one drawing does for light, dark and paper.
"""

from __future__ import annotations

import io
import re
from importlib.util import find_spec
from typing import Any

from fx100_lmcache.accept.bench import Bench
from fx100_lmcache.accept.steps import Chart, Outcome, Step, not_run

PLOTS = "plots"

_PLACEHOLDER = "#010203"
"""Drawn in this colour, and then replaced by the page's."""
_COLOURS = ("#2f7ed8", "#d9661f", "#2f9e5b", "#a34fc4", "#c23a4b", "#8a7a1f", "#1f9aa3", "#777777")
_FLOAT = re.compile(r"(\d+\.\d\d)\d+")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plots_step() -> Step:
    """Return the step that looks whether the report can have its plots."""
    return Step(PLOTS, "the report has its plots", _look)


def _look(bench: Bench) -> Outcome:
    if not can_draw():
        return not_run("matplotlib is not installed: pip install matplotlib")
    outcome = Outcome()
    outcome.note("plots", str(sum(len(each.charts) for each in bench.earlier.values())))
    return outcome


def draw(chart: Chart) -> str:
    """Return a chart as SVG; empty without matplotlib."""
    if not can_draw():
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.title,
        "font.family": "sans-serif",
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"),
            _PLACEHOLDER,
        ),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for at, (name, points) in enumerate(chart.lines.items()):
            xs, ys = zip(*points, strict=True) if points else ((), ())
            axes.plot(
                xs, ys, marker="o", markersize=3.5, label=name, color=_COLOURS[at % len(_COLOURS)]
            )
        if chart.log_x:
            ticks = sorted({x for points in chart.lines.values() for x, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if chart.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        axes.grid(visible=True, color=_PLACEHOLDER, alpha=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        if len(chart.lines) > 1:
            axes.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_PLACEHOLDER, "currentColor")
    return _FLOAT.sub(r"\1", svg)
