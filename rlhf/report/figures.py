"""The report's figures: data frames in, PNG files out, the same bytes from run to run.

Colours are Okabe and Ito's (safe for colour-blind readers); every series also differs in line style or
marker, so that a black-and-white print can be read. Titles say what is plotted, axis labels carry the unit.
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
DIAGNOSTICS = {
    "policy_loss": "Policy loss (1)",
    "value_loss": "Value loss (reward²)",
    "policy_grad_norm": "Policy gradient norm, unclipped",
    "value_grad_norm": "Value gradient norm, unclipped",
    "clip_fraction": "Clipped tokens (share)",
    "mean_ratio": "Mean probability ratio (1)",
    "skipped_updates": "Skipped updates (per step)",
    "entropy": "Entropy (nats per token)",
    "ended_rate": "Ended by EOS (share)",
    "length": "Length (tokens)",
    "repetition": "Repetition (share)",
    "kl_beta": "KL coefficient (1)",
}


@contextmanager
def _page(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[np.ndarray]:
    """Give a grid of axes [rows, columns]; write the PNG at the end, whatever the matplotlibrc."""
    with style.context(["default", STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(rows, columns, squeeze=False)
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


def policies(path: Path, table: pd.DataFrame) -> None:
    """Positive rates with intervals and review NLL, one row per policy.

    `table` is indexed by policy as printed (base, SFT, ...); columns positive_rate, positive_rate_low,
    positive_rate_high (shares), the same for positive_rate_continuation and for nll_per_token (nats).
    """
    with _page(path, 1, 3, (9.5, 0.9 + 0.34 * len(table))) as axes:
        _rates(axes[0, 0], table, "positive_rate")
        axes[0, 0].set(title="Judged positive: full text", xlabel="texts (%)")
        _rates(axes[0, 1], table, "positive_rate_continuation")
        axes[0, 1].set(title="Judged positive: continuation", xlabel="texts (%)")
        _intervals(axes[0, 2], table, "nll_per_token")
        axes[0, 2].set(title="Held-out reviews", xlabel="NLL (nats per token; lower is better)")
        for axis in axes[0, 1:]:
            axis.tick_params(labelleft=False)


def _rates(axis: Axes, table: pd.DataFrame, name: str) -> None:
    _intervals(axis, table, name, 100)
    axis.set_xlim(-3, 103)


def _intervals(axis: Axes, table: pd.DataFrame, name: str, scale: float = 1) -> None:
    low, middle, high = (scale * table[column].to_numpy() for column in (f"{name}_low", name, f"{name}_high"))
    _points(axis, table.index, middle, np.stack([middle - low, high - middle]))


def _points(axis: Axes, names: pd.Index, values: np.ndarray, errors: np.ndarray) -> None:
    for i, name in enumerate(names):
        colour, marker = {"base": (GREY, "s"), "SFT": (BLUE, "D")}.get(name, (ORANGE, "o"))
        axis.errorbar(values[i], i, xerr=np.maximum(errors[:, [i]], 0), fmt=marker, color=colour, capsize=3)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


def differences(path: Path, table: pd.DataFrame) -> None:
    """Forest plot: one panel per measure, one row per comparison, mean difference with its 95% interval.

    `table` has the columns measure, unit, comparison, pooled (bool), mean, low, high, new_low, new_high, in
    display order.
    """
    measures = list(dict.fromkeys(table["measure"]))
    columns = min(4, len(measures))
    rows = -(-len(measures) // columns)
    height = 0.9 + 0.24 * table["comparison"].nunique()
    with _page(path, rows, columns, (10.5, rows * height)) as axes:
        for axis in axes.flat[len(measures) :]:
            axis.set_visible(False)
        for number, measure in enumerate(measures):
            axis = axes.flat[number]
            _forest(axis, table[table["measure"] == measure])
            axis.tick_params(labelleft=number % columns == 0)


def _forest(axis: Axes, rows: pd.DataFrame) -> None:
    for i, row in enumerate(rows.itertuples()):
        clear = row.low > 0 or row.high < 0
        colour = ORANGE if row.pooled else BLUE
        axis.plot([row.low, row.high], [i, i], color=colour, linewidth=3 if row.pooled else 1.3)
        axis.plot([row.new_low, row.new_high], [i, i], color=colour, linewidth=1)
        axis.plot(
            row.mean,
            i,
            "D" if row.pooled else "o",
            color=colour,
            markerfacecolor=colour if clear else "white",
        )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), rows["comparison"])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.margins(x=0.1)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set_title(rows["measure"].iloc[0])
    axis.set_xlabel(rows["unit"].iloc[0])


def overoptimisation(
    path: Path, checks: dict[int, pd.DataFrame], selected: dict[int, int], table: pd.DataFrame
) -> None:
    """Change of reward and judge against KL along training, and reward against the judge at the end.

    `checks[seed]` comes from `trajectory.along`; `table` is indexed by policy as printed, with the columns
    reward ([-1, 1]) and judge_full (probability), each with _low and _high.
    """
    with _page(path, 1, 3, (11.5, 3.7)) as axes:
        for axis, name, title in ((axes[0, 0], "reward", "Reward"), (axes[0, 1], "judge", "Judge")):
            for i, (seed, log) in enumerate(checks.items()):
                _gains(axis, log, name, f"PPO {seed}", i)
                _mark_selected(axis, log, selected[seed], "kl", f"{name}_gain")
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set(title=f"{title} along training", xlabel="KL from SFT (nats per sequence)")
        axes[0, 0].set_ylabel("change from SFT (probability)")
        axes[0, 1].sharey(axes[0, 0])
        axes[0, 0].legend(loc="upper left")
        _reward_against_judge(axes[0, 2], table)


def _gains(axis: Axes, log: pd.DataFrame, name: str, label: str, i: int) -> None:
    mean = log[f"{name}_gain"]
    error = np.maximum([mean - log[f"{name}_low"], log[f"{name}_high"] - mean], 0)
    axis.errorbar(log["kl"], mean, yerr=error, elinewidth=0.7, capsize=2, label=label, **_seed_style(i))


def _reward_against_judge(axis: Axes, table: pd.DataFrame) -> None:
    axis.axline((0.5, 0.5), slope=1, color=GREY, linewidth=0.8, label="reward = judge")
    for i, (name, row) in enumerate(table.iterrows()):
        seed = i - 2  # the seeds follow base and SFT
        fixed = {"base": (GREY, "X"), "SFT": (BLUE, "*")}
        colour, marker = fixed.get(name, (SEED_COLOURS[seed % 6], MARKERS[seed % 6]))
        bars = [_error(row, column, scale) for column, scale in (("reward", 2), ("judge_full", 1))]
        x, y = (row["reward"] + 1) / 2, row["judge_full"]
        axis.errorbar(x, y, bars[1], bars[0], marker, color=colour, elinewidth=0.7, markersize=7, label=name)
    axis.margins(0.1)
    axis.set(title="Test prefixes", xlabel="reward as probability, (reward + 1) / 2")
    axis.set_ylabel("judged probability")
    axis.legend(loc="upper left")


def _error(row: pd.Series, column: str, scale: float) -> np.ndarray:
    below, above = row[column] - row[f"{column}_low"], row[f"{column}_high"] - row[column]
    return np.maximum([[below], [above]], 0) / scale


def _seed_style(i: int) -> dict:
    return {
        "color": SEED_COLOURS[i % len(SEED_COLOURS)],
        "linestyle": LINE_STYLES[i % len(LINE_STYLES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 3.5,
        "linewidth": 1.2,
    }


def _mark_selected(axis: Axes, log: pd.DataFrame, step: int, x: str, y: str) -> None:
    chosen = log[log["step"] == step]
    axis.plot(
        chosen[x], chosen[y], marker="o", markersize=11, markerfacecolor="none", color="black", linestyle=""
    )


def reward_model(path: Path, curve: pd.DataFrame, confusion: np.ndarray) -> None:
    """Calibration curve and confusion matrix.

    `curve` has the columns mean_probability, observed_rate and count, a row per bin; `confusion` is
    [2, 2] counts, rows the human label (negative, positive), columns the prediction.
    """
    with _page(path, 1, 2, (8.0, 3.4)) as axes:
        axes[0, 0].plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
        axes[0, 0].plot(curve["mean_probability"], curve["observed_rate"], color=BLUE, linewidth=1)
        axes[0, 0].scatter(
            curve["mean_probability"],
            curve["observed_rate"],
            s=10 + 2 * curve["count"],
            color=BLUE,
            alpha=0.6,
        )
        axes[0, 0].set(title="Calibration (area: rows in bin)", xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
        axes[0, 0].set(xlabel="predicted probability of positive", ylabel="share labelled positive")
        axes[0, 1].imshow(confusion, cmap="Blues", vmin=0)
        for (row, column), count in np.ndenumerate(confusion):
            colour = "white" if count > confusion.max() / 2 else "black"
            axes[0, 1].text(column, row, str(count), ha="center", va="center", color=colour, fontsize=13)
        axes[0, 1].set_xticks([0, 1], ["negative", "positive"])
        axes[0, 1].set_yticks([0, 1], ["negative", "positive"], rotation=90, va="center")
        axes[0, 1].set(title="Confusion matrix (rows)", xlabel="reward model", ylabel="human label")
        axes[0, 1].grid(False)


def training(
    path: Path,
    sft: pd.DataFrame,
    reward: pd.DataFrame,
    reward_validation: pd.DataFrame,
    ppo: dict[int, pd.DataFrame],
) -> None:
    """Training curves of the three stages against the optimiser step (PPO: rollout batch)."""
    with _page(path, 2, 2, (9.5, 6.0)) as axes:
        _smoothed(axes[0, 0], sft["step"], sft["loss"])
        axes[0, 0].set(title="SFT", xlabel="optimiser step", ylabel="training loss (nats per token)")
        _smoothed(axes[0, 1], reward["step"], reward["bce"])
        axes[0, 1].plot(
            reward_validation["step"],
            reward_validation["bce"],
            "o--",
            color=ORANGE,
            label="validation",
            markersize=4,
        )
        axes[0, 1].set(title="Reward model", xlabel="optimiser step", ylabel="BCE (nats)")
        axes[0, 1].legend()
        _per_seed(axes[1, 0], ppo, "reward", "training reward [-1, 1]")
        axes[1, 0].set_title("PPO: reward being optimised")
        _per_seed(axes[1, 1], ppo, "kl", "KL from SFT (nats per sequence)")
        axes[1, 1].set_title("PPO: distance from SFT")
        axes[1, 0].legend()


def _smoothed(axis: Axes, step: pd.Series, values: pd.Series) -> None:
    window = max(1, len(values) // 10)
    axis.plot(step, values, color=BLUE, alpha=0.3, linewidth=0.8, label="each step")
    mean = values.rolling(window, min_periods=1).mean()
    axis.plot(step, mean, color=BLUE, label=f"mean of last {window}")
    axis.legend()


def _per_seed(axis: Axes, logs: dict[int, pd.DataFrame], column: str, label: str) -> None:
    for i, (seed, log) in enumerate(logs.items()):
        marks = max(1, len(log) // 12)
        axis.plot(log["step"], log[column], label=f"seed {seed}", markevery=marks, **_seed_style(i))
    axis.set(xlabel="PPO step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def validation(path: Path, logs: dict[int, pd.DataFrame], selected: dict[int, int]) -> None:
    """Fixed-validation reward and KL per seed (same prefixes and noise at each check); ring: selected."""
    with _page(path, 1, 2, (9.5, 3.2)) as axes:
        for axis, column, label in (
            (axes[0, 0], "reward", "reward [-1, 1]"),
            (axes[0, 1], "kl", "KL from SFT (nats per sequence)"),
        ):
            _per_seed(axis, logs, column, label)
            for seed, log in logs.items():
                _mark_selected(axis, log, selected[seed], "step", column)
        axes[0, 0].set_title("Fixed validation: reward (ring: selected)")
        axes[0, 1].set_title("Fixed validation: KL (ring: selected)")
        axes[0, 0].legend()


def diagnostics(path: Path, logs: dict[int, pd.DataFrame]) -> None:
    """The PPO update step by step: losses, gradient norms, clipping, skips, entropy, EOS rate, length."""
    with _page(path, 4, 3, (10.0, 9.0)) as axes:
        for axis, (column, label) in zip(axes.flat, DIAGNOSTICS.items(), strict=True):
            _per_seed(axis, logs, column, "")
            axis.set_title(label)
            axis.ticklabel_format(axis="y", useOffset=False)
        lines, names = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(lines, names, loc="outside upper center", ncols=6)
