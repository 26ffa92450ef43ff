"""The README's pictures, drawn from what was just measured: medians, with the range of their rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.benchmarks.ratio import Curve, Ratio

__all__ = ["draw_growth", "draw_peers"]

# The same numbers make the same file, and letters stay letters.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "oncely",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_OURS, _THEIRS = "#1f6f5c", "#9aa5b1"


def draw_growth(curves: Sequence[Curve], path: Path) -> None:
    """A panel for each curve."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 6), layout="constrained")
        for axes, curve in zip(figure.subplots(2, 2).flat, curves, strict=True):
            _draw_curve(axes, curve)
        _save(figure, path)


def draw_peers(drains: Sequence[Ratio], path: Path) -> None:
    """A bar for each contestant, ours first, on a logarithmic axis."""
    with mpl.rc_context(_STYLE):
        rates = {"oncely": drains[0].ours} | {drain.against: drain.bare for drain in drains}
        figure = Figure(figsize=(9, 0.6 + 0.35 * len(rates)), layout="constrained")
        axes = figure.subplots()
        colours = [_OURS, *[_THEIRS] * len(drains)]
        bars = axes.barh(list(rates), list(rates.values()), color=colours)
        axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates.values()], padding=3)
        axes.set_xscale("log")
        axes.set_xlim(left=10, right=3 * max(rates.values()))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("events drained a second")
        _save(figure, path)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    for name, line in curve.lines.items():
        medians = [statistics.median(rates) for rates in line.values()]
        below = [middle - min(rates) for middle, rates in zip(medians, line.values(), strict=True)]
        above = [max(rates) - middle for middle, rates in zip(medians, line.values(), strict=True)]
        # Places stand side by side, whatever lies between them: 0 keys and 10,000 fit on one axis.
        axes.errorbar(
            [f"{place:,}" for place in line], medians, yerr=(below, above), marker="o", capsize=3, label=name
        )
    axes.set_title(curve.title, fontsize=9)
    axes.set_xlabel(curve.axis)
    axes.set_ylabel("events a second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if len(curve.lines) > 1:
        axes.legend()


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
