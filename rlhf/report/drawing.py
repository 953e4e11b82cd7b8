"""What every figure is drawn with: the page, the style, a series per PPO seed, the same bytes each time.

Colours are Okabe and Ito's (safe for colour-blind readers); every series also differs in line style or
marker, so that a black-and-white print can be read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

GREY, BLUE, ORANGE = "#7f7f7f", "#0072B2", "#D55E00"
SEED_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
DPI = 144
STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}


@contextmanager
def page(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[np.ndarray]:
    """Give a grid of axes [rows, columns]; write the PNG at the end, whatever the matplotlibrc."""
    with style.context(["default", STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(rows, columns, squeeze=False)
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


def intervals(axis: Axes, table: pd.DataFrame, name: str, scale: float = 1) -> None:
    """Plot a number of every policy, a column with _low and _high, one row per policy."""
    low, middle, high = (scale * table[column].to_numpy() for column in (f"{name}_low", name, f"{name}_high"))
    _points(axis, table.index, middle, np.stack([middle - low, high - middle]))


def _points(axis: Axes, names: pd.Index, values: np.ndarray, errors: np.ndarray) -> None:
    for i, name in enumerate(names):
        colour, marker = {"base": (GREY, "s"), "SFT": (BLUE, "D")}.get(name, (ORANGE, "o"))
        axis.errorbar(values[i], i, xerr=np.maximum(errors[:, [i]], 0), fmt=marker, color=colour, capsize=3)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


def _error(row: pd.Series, column: str) -> np.ndarray:
    below, above = row[column] - row[f"{column}_low"], row[f"{column}_high"] - row[column]
    return np.maximum([[below], [above]], 0)


def against(axis: Axes, table: pd.DataFrame, x: str, y: str) -> None:
    """Plot two numbers of every policy, each a column with _low and _high, against each other."""
    for i, (name, row) in enumerate(table.iterrows()):
        seed = i - 2  # the seeds follow base and SFT
        fixed = {"base": (GREY, "X"), "SFT": (BLUE, "*")}
        colour, marker = fixed.get(name, (SEED_COLOURS[seed % 6], MARKERS[seed % 6]))
        bars = {"xerr": _error(row, x), "yerr": _error(row, y), "elinewidth": 0.7}
        axis.errorbar(row[x], row[y], fmt=marker, color=colour, markersize=7, label=name, **bars)
    axis.margins(0.1)


def gains(axis: Axes, log: pd.DataFrame, name: str, label: str, i: int) -> None:
    """Plot a change from SFT against the KL; `log` is one seed's of `trajectory.along`."""
    mean = log[f"{name}_gain"]
    error = np.maximum([mean - log[f"{name}_low"], log[f"{name}_high"] - mean], 0)
    axis.errorbar(log["kl"], mean, yerr=error, elinewidth=0.7, capsize=2, label=label, **seed_style(i))


def calibration(axis: Axes, curve: pd.DataFrame) -> None:
    """Plot a row per bin: `curve` has mean_probability, observed_rate and count."""
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    axis.plot(curve["mean_probability"], curve["observed_rate"], color=BLUE, linewidth=1)
    area = 10 + 2 * curve["count"]
    axis.scatter(curve["mean_probability"], curve["observed_rate"], s=area, color=BLUE, alpha=0.6)


def seed_style(i: int) -> dict:
    """Return colour, line and marker of the i-th PPO seed."""
    return {
        "color": SEED_COLOURS[i % len(SEED_COLOURS)],
        "linestyle": LINE_STYLES[i % len(LINE_STYLES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 3.5,
        "linewidth": 1.2,
    }


def mark_selected(axis: Axes, log: pd.DataFrame, step: int, x: str, y: str) -> None:
    """Draw a ring round the selected step."""
    chosen = log[log["step"] == step]
    axis.plot(
        chosen[x], chosen[y], marker="o", markersize=11, markerfacecolor="none", color="black", linestyle=""
    )


def smoothed(axis: Axes, step: pd.Series, values: pd.Series) -> None:
    """Plot a loss at each step, and its mean over the last tenth of them."""
    window = max(1, len(values) // 10)
    axis.plot(step, values, color=BLUE, alpha=0.3, linewidth=0.8, label="each step")
    mean = values.rolling(window, min_periods=1).mean()
    axis.plot(step, mean, color=BLUE, label=f"mean of last {window}")
    axis.legend()


def per_seed(axis: Axes, logs: dict[int, pd.DataFrame], column: str, label: str) -> None:
    """Plot a column of every seed's log against the step."""
    for i, (seed, log) in enumerate(logs.items()):
        marks = max(1, len(log) // 12)
        axis.plot(log["step"], log[column], label=f"seed {seed}", markevery=marks, **seed_style(i))
    axis.set(xlabel="PPO step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
