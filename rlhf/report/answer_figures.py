"""Figures of the report on answers that `rlhf.report.figures` does not have."""

from pathlib import Path

import numpy as np
import pandas as pd

from rlhf.report.answers import REWARD_UNIT
from rlhf.report.drawing import BLUE, against, calibration, gains, mark_selected, page
from rlhf.report.figures import Panel
from rlhf.report.pairs import Accuracy

PANELS = (
    Panel("heuristic", "Heuristic score", "points, -5 to 5", False),
    Panel("chrf", "Content: chrF", "0 to 100", False),
    Panel("ended_rate", "Ended by itself", "answers (%)", True),
    Panel("nll_per_token", "Reference answers", "NLL (nats per token)", False),
)


def overoptimisation(
    path: Path, checks: dict[int, pd.DataFrame], selected: dict[int, int], table: pd.DataFrame
) -> None:
    """Change of reward and heuristic score against KL along training, and against each other at the end.

    `checks[seed]` comes from `trajectory.along`; `table` is indexed by policy as printed, with the columns
    reward and heuristic, each with _low and _high.
    """
    panels = (
        ("reward", "Reward", f"change from SFT ({REWARD_UNIT})"),
        ("heuristic", "Heuristic score", "change from SFT (points)"),
    )
    with page(path, 1, 3, (11.5, 3.7)) as axes:
        for axis, (name, title, label) in zip(axes[0], panels, strict=False):
            for i, (seed, log) in enumerate(checks.items()):
                gains(axis, log, name, f"PPO {seed}", i)
                mark_selected(axis, log, selected[seed], "kl", f"{name}_gain")
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set(title=f"{title} along training", xlabel="KL from SFT (nats per sequence)", ylabel=label)
        axes[0, 0].legend(loc="upper left")
        against(axes[0, 2], table, "reward", "heuristic")
        axes[0, 2].set(title="Test questions", xlabel=f"reward ({REWARD_UNIT})")
        axes[0, 2].set_ylabel("heuristic score (points)")
        axes[0, 2].legend(loc="upper left")


def reward_model(path: Path, curve: pd.DataFrame, found: list[Accuracy]) -> None:
    """Calibration of the preferred answer's probability, and accuracy by group of pairs with intervals.

    `curve` has the columns mean_probability, observed_rate and count, a row per bin.
    """
    with page(path, 1, 2, (9.5, 3.4)) as axes:
        calibration(axes[0, 0], curve)
        axes[0, 0].set(title="Calibration (area: pairs in bin)", xlim=(0.45, 1.05), ylim=(-0.05, 1.05))
        axes[0, 0].set(xlabel="probability of the answer preferred", ylabel="share of pairs it was chosen in")
        axis = axes[0, 1]
        for i, group in enumerate(found):
            low, high = group.interval or (group.share, group.share)
            bars = np.maximum([[group.share - low], [high - group.share]], 0)
            axis.errorbar(group.share, i, xerr=bars, fmt="o", color=BLUE, capsize=3)
        axis.axvline(0.5, color="black", linewidth=0.8)
        axis.set_yticks(range(len(found)), [f"{group.name} ({group.n})" for group in found])
        axis.set_ylim(len(found) - 0.5, -0.5)
        axis.set(title="Pairs ordered right", xlabel="share (line: chance)", xlim=(-0.03, 1.03))
