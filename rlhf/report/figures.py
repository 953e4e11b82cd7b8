"""The report's figures: data frames in, PNG files out, the same bytes from run to run.

Titles say what is plotted, axis labels carry the unit.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from rlhf.report.drawing import (
    BLUE,
    GREY,
    ORANGE,
    against,
    calibration,
    gains,
    intervals,
    mark_selected,
    page,
    per_seed,
    smoothed,
)


class Panel(NamedTuple):
    """One number of every policy: its column, what the axis says, and whether it is a rate, shown in %."""

    column: str
    title: str
    label: str
    rate: bool


PANELS = (
    Panel("positive_rate", "Judged positive: full text", "texts (%)", True),
    Panel("positive_rate_continuation", "Judged positive: continuation", "texts (%)", True),
    Panel("nll_per_token", "Held-out reviews", "NLL (nats per token; lower is better)", False),
)

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


def policies(path: Path, table: pd.DataFrame, panels: tuple[Panel, ...] = PANELS) -> None:
    """Rates and means with their intervals, one row per policy.

    `table` is indexed by policy as printed (base, SFT, ...); for each panel it has its column, a share where
    that is a rate, and that with _low and _high.
    """
    with page(path, 1, len(panels), (9.5, 0.9 + 0.34 * len(table))) as axes:
        for axis, panel in zip(axes[0], panels, strict=True):
            intervals(axis, table, panel.column, 100 if panel.rate else 1)
            if panel.rate:
                axis.set_xlim(-3, 103)
            axis.set(title=panel.title, xlabel=panel.label)
        for axis in axes[0, 1:]:
            axis.tick_params(labelleft=False)


def differences(path: Path, table: pd.DataFrame) -> None:
    """Forest plot: one panel per measure, one row per comparison, mean difference with its 95% interval.

    `table` has the columns measure, unit, comparison, pooled (bool), mean, low, high, new_low, new_high, in
    display order.
    """
    measures = list(dict.fromkeys(table["measure"]))
    columns = min(4, len(measures))
    rows = -(-len(measures) // columns)
    height = 0.9 + 0.24 * table["comparison"].nunique()
    with page(path, rows, columns, (10.5, rows * height)) as axes:
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
    with page(path, 1, 3, (11.5, 3.7)) as axes:
        for axis, name, title in ((axes[0, 0], "reward", "Reward"), (axes[0, 1], "judge", "Judge")):
            for i, (seed, log) in enumerate(checks.items()):
                gains(axis, log, name, f"PPO {seed}", i)
                mark_selected(axis, log, selected[seed], "kl", f"{name}_gain")
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set(title=f"{title} along training", xlabel="KL from SFT (nats per sequence)")
        axes[0, 0].set_ylabel("change from SFT (probability)")
        axes[0, 1].sharey(axes[0, 0])
        axes[0, 0].legend(loc="upper left")
        _reward_against_judge(axes[0, 2], table)


def _reward_against_judge(axis: Axes, table: pd.DataFrame) -> None:
    axis.axline((0.5, 0.5), slope=1, color=GREY, linewidth=0.8, label="reward = judge")
    ends = ("reward", "reward_low", "reward_high")
    against(axis, table.assign(**{name: (table[name] + 1) / 2 for name in ends}), "reward", "judge_full")
    axis.set(title="Test prefixes", xlabel="reward as probability, (reward + 1) / 2")
    axis.set_ylabel("judged probability")
    axis.legend(loc="upper left")


def reward_model(path: Path, curve: pd.DataFrame, confusion: np.ndarray) -> None:
    """Calibration curve and confusion matrix.

    `curve` has the columns mean_probability, observed_rate and count, a row per bin; `confusion` is
    [2, 2] counts, rows the human label (negative, positive), columns the prediction.
    """
    with page(path, 1, 2, (8.0, 3.4)) as axes:
        calibration(axes[0, 0], curve)
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
    loss_label: str = "BCE (nats)",
    reward_unit: str = "[-1, 1]",
) -> None:
    """Training curves of the three stages against the optimiser step (PPO: rollout batch)."""
    with page(path, 2, 2, (9.5, 6.0)) as axes:
        smoothed(axes[0, 0], sft["step"], sft["loss"])
        axes[0, 0].set(title="SFT", xlabel="optimiser step", ylabel="training loss (nats per token)")
        smoothed(axes[0, 1], reward["step"], reward["loss"])
        axes[0, 1].plot(
            reward_validation["step"],
            reward_validation["loss"],
            "o--",
            color=ORANGE,
            label="validation",
            markersize=4,
        )
        axes[0, 1].set(title="Reward model", xlabel="optimiser step", ylabel=loss_label)
        axes[0, 1].legend()
        per_seed(axes[1, 0], ppo, "reward", f"training reward {reward_unit}")
        axes[1, 0].set_title("PPO: reward being optimised")
        per_seed(axes[1, 1], ppo, "kl", "KL from SFT (nats per sequence)")
        axes[1, 1].set_title("PPO: distance from SFT")
        axes[1, 0].legend()


def validation(
    path: Path, logs: dict[int, pd.DataFrame], selected: dict[int, int], reward_unit: str = "[-1, 1]"
) -> None:
    """Fixed-validation reward and KL per seed (same prefixes and noise at each check); ring: selected."""
    with page(path, 1, 2, (9.5, 3.2)) as axes:
        for axis, column, label in (
            (axes[0, 0], "reward", f"reward {reward_unit}"),
            (axes[0, 1], "kl", "KL from SFT (nats per sequence)"),
        ):
            per_seed(axis, logs, column, label)
            for seed, log in logs.items():
                mark_selected(axis, log, selected[seed], "step", column)
        axes[0, 0].set_title("Fixed validation: reward (ring: selected)")
        axes[0, 1].set_title("Fixed validation: KL (ring: selected)")
        axes[0, 0].legend()


def diagnostics(path: Path, logs: dict[int, pd.DataFrame]) -> None:
    """The PPO update step by step: losses, gradient norms, clipping, skips, entropy, EOS rate, length.

    A column that no run fills, as the value head's without one, leaves its place empty.
    """
    with page(path, 4, 3, (10.0, 9.0)) as axes:
        for axis, (column, label) in zip(axes.flat, DIAGNOSTICS.items(), strict=True):
            axis.set_visible(any(log[column].notna().any() for log in logs.values()))
            per_seed(axis, logs, column, "")
            axis.set_title(label)
            axis.ticklabel_format(axis="y", useOffset=False)
        lines, names = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(lines, names, loc="outside upper center", ncols=6)
