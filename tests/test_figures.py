"""Every figure is drawn, is a PNG without a trace of the machine, and has the same bytes when drawn again."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import image

from rlhf.report import drawing, figures

STEPS = np.arange(1, 25)


def ppo_logs(seeds=(1, 2)):
    logs = {}
    for seed in seeds:
        noise = np.random.default_rng(seed).normal(0, 0.1, len(STEPS))
        columns = dict.fromkeys(figures.DIAGNOSTICS, 1 + noise)
        logs[seed] = pd.DataFrame({"step": STEPS, "reward": STEPS / 24 + noise, "kl": STEPS / 20, **columns})
        logs[seed].loc[3, ["policy_grad_norm", "value_grad_norm"]] = np.nan
    return logs


def checks(seeds=(1, 2)):
    step = np.array([0, 12, 24])
    return {s: pd.DataFrame({"step": step, "reward": step / 30 + s / 10, "kl": step / 20}) for s in seeds}


def gains(seeds=(1, 2)):
    step = np.array([0, 12, 24])
    logs = {}
    for seed in seeds:
        mean, width = step / 60 * seed, step / 200
        columns = {f"{n}_{end}": mean + w for n in ("reward", "judge")
                   for end, w in (("gain", 0), ("low", -width), ("high", width))}  # fmt: skip
        logs[seed] = pd.DataFrame({"step": step, "kl": step / 20 + seed / 9, **columns})
    return logs


def policy_table():
    middle = {
        "positive_rate": [0.4, 0.5, 0.8, 1.0],
        "positive_rate_continuation": [0.3, 0.5, 0.7, 0.9],
        "nll_per_token": [5, 4, 4, 4.1],
        "reward": [-0.3, -0.2, 0.3, 0.4],
        "judge_full": [0.3, 0.4, 0.6, 0.7],
    }
    ends = {f"{name}_{end}": np.add(values, sign / 10)
            for name, values in middle.items() for end, sign in (("low", -1), ("high", 1))}  # fmt: skip
    return pd.DataFrame({**middle, **ends}, index=["base", "SFT", "PPO 1", "PPO 2"])


def difference_table(measures=5):
    return pd.DataFrame(
        {
            "measure": f"Measure {m}",
            "unit": "nats",
            "comparison": name,
            "pooled": name == "PPO - SFT",
            "mean": m + 0.1,
            "low": m - 0.2,
            "high": m + 0.4,
            "new_low": m - 0.6,
            "new_high": m + 0.8,
        }
        for m in range(measures)
        for name in ("SFT - base", "PPO 1 - SFT", "PPO - SFT")
    )


def curve():
    rows = [(5, 0.1, 0.2), (9, 0.5, 0.4), (20, 0.9, 1.0)]
    return pd.DataFrame(rows, columns=["count", "mean_probability", "observed_rate"])


def step_log(column):
    return pd.DataFrame({"step": STEPS, column: 4 + 1 / STEPS})


DRAWINGS = {
    "policies": lambda path: figures.policies(path, policy_table()),
    "differences": lambda path: figures.differences(path, difference_table()),
    "one_measure": lambda path: figures.differences(path, difference_table(measures=1)),
    "overoptimisation": lambda path: figures.overoptimisation(path, gains(), {1: 24, 2: 0}, policy_table()),
    "reward_model": lambda path: figures.reward_model(path, curve(), np.array([[20, 3], [4, 30]])),
    "training": lambda path: figures.training(
        path, step_log("loss"), step_log("loss"), step_log("loss").iloc[::8], ppo_logs()
    ),
    "validation": lambda path: figures.validation(path, checks(), {1: 24, 2: 0}),
    "diagnostics": lambda path: figures.diagnostics(path, ppo_logs()),
    "seven_seeds": lambda path: figures.validation(path, checks(range(7)), dict.fromkeys(range(7), 12)),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_figure_is_the_same_bytes_again_whatever_the_readers_style(tmp_path, name):
    DRAWINGS[name](tmp_path / "one.png")
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "savefig.dpi": 30}):
        DRAWINGS[name](tmp_path / "two.png")
    first = (tmp_path / "one.png").read_bytes()
    assert first == (tmp_path / "two.png").read_bytes()
    assert first.startswith(b"\x89PNG") and b"Software" not in first and b"tEXt" not in first
    pixels = image.imread(tmp_path / "one.png")
    assert pixels.shape[1] >= 1100 and pixels[..., :3].std() > 0.02


def test_every_series_differs_without_colour():
    styles = [drawing.seed_style(i) for i in range(4)]
    assert len({(s["linestyle"], s["marker"]) for s in styles}) == 4
    assert len({s["color"] for s in styles}) == 4


def draw(folder, name, draw_one, *arguments):
    draw_one(folder / f"{name}.png", *arguments)
    return (folder / f"{name}.png").read_bytes()


def test_a_figure_of_other_numbers_is_another_figure(tmp_path):
    changed = policy_table()
    changed.loc["SFT", "nll_per_token_high"] = 4.5
    pair = [draw(tmp_path, "one", figures.policies, table) for table in (policy_table(), changed)]
    assert pair[0] != pair[1]


@pytest.mark.parametrize("column", ["judge_gain", "judge_low", "reward_high", "kl"])
def test_every_number_along_training_is_drawn(tmp_path, column):
    moved = gains()
    moved[2].loc[1, column] += 0.2
    arguments = {1: 24, 2: 0}, policy_table()
    pair = [draw(tmp_path, "one", figures.overoptimisation, logs, *arguments) for logs in (gains(), moved)]
    assert pair[0] != pair[1]


@pytest.mark.parametrize("column", ["mean", "low", "new_high"])
def test_every_number_of_the_forest_is_drawn(tmp_path, column):
    moved = difference_table(2)
    moved.loc[2, column] -= 0.1
    pair = [draw(tmp_path, "one", figures.differences, table) for table in (difference_table(2), moved)]
    assert pair[0] != pair[1]
