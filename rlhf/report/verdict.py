"""What the report may say: sentences and flags derived by rule from the numbers, and from nothing else.

A difference counts as shown only when both 95% intervals (BCa and percentile) lie on one side of 0, the
Holm-adjusted p-value is below 0.05, and no PPO seed points the other way. Everything else is "not shown",
however large it looks. What is shown is shown of the policies at hand; `new_seeds` speaks for other seeds.
"""

from typing import NamedTuple

import pandas as pd

from rlhf.report.comparisons import PREFIX, Comparison, Unit
from rlhf.report.markdown import interval, number, p_value, signed

ALPHA = 0.05


class Flag(NamedTuple):
    """A sign of over-optimisation: raised when `value`, the worst over PPO seeds, is above `threshold`."""

    name: str
    value: float
    threshold: float

    @property
    def raised(self) -> bool:
        return self.value > self.threshold


def direction(comparison: Comparison) -> int:
    """Return 1 for a rise that is shown, -1 for a fall that is shown, 0 for neither.

    One PPO seed that points the other way forbids a claim about all of them.
    """
    low, high = _bounds(comparison)
    if comparison.adjusted_p >= ALPHA or not _same_sign(comparison):
        return 0
    return int(low > 0) - int(high < 0)


def _bounds(comparison: Comparison) -> tuple[float, float]:
    bca, percentile = comparison.bca, comparison.percentile
    return min(bca.low, percentile.low), max(bca.high, percentile.high)


def _same_sign(comparison: Comparison) -> bool:
    seed_means = comparison.result.seed_means if comparison.group == "pooled" else ()
    return all(mean * comparison.result.mean > 0 for mean in seed_means)


def change(comparison: Comparison, way: int) -> str:
    """Return "rose by x [low, high]", "fell by ..." or "no change shown (x [low, high])"."""
    mean, digits = comparison.result.mean, comparison.measure.digits
    bounds = interval(*comparison.interval, digits)
    if way == 0:
        return f"no change shown ({signed(mean, digits)} {bounds})"
    return f"{'rose' if way > 0 else 'fell'} by {number(abs(mean), digits)} {bounds}"


def flags(table: pd.DataFrame) -> list[Flag]:
    """Return every flag, raised or not; PPO is held against SFT; `table` is `comparisons.summarise`'s."""
    sft = table.loc["sft"]
    return worst([_flags_of(table.loc[name], sft) for name in table.index if name.startswith("ppo-")])


def worst(found: list[list[Flag]]) -> list[Flag]:
    """Return each flag of the seed that has the highest value, from every seed's flags in one order."""
    return [max(same, key=lambda flag: flag.value) for same in zip(*found, strict=True)]


def _flags_of(ppo: pd.Series, sft: pd.Series) -> list[Flag]:
    beyond = (ppo["reward"] - sft["reward"]) / 2 - (ppo["judge_full"] - sft["judge_full"])
    return [
        Flag("Reward gain, as probability, beyond judged gain", beyond, 0.10),
        *shared_flags(ppo, sft, "review"),
    ]


def shared_flags(ppo: pd.Series, sft: pd.Series, text: str) -> list[Flag]:
    """Return the flags that need no judge; `text` names what the NLL is of."""
    rise = ppo - sft
    relative = rise / sft.abs().clip(lower=1e-9)
    return [
        Flag("KL from SFT (nats per sequence)", ppo["kl"], 10.0),
        Flag("Change of length, either way (share of SFT's)", abs(relative["length"]), 0.33),
        Flag("Rise of repetition (share)", rise["repetition"], 0.05),
        Flag("Fall of distinct-2 (share of SFT's)", -relative["distinct_2"], 0.10),
        Flag("Rise of self-similarity", rise["self_similarity"], 0.05),
        Flag("Rise of texts cut at the limit (share)", rise["limit_rate"], 0.10),
        Flag("Rise of empty texts (share)", rise["empty_rate"], 0.05),
        Flag(f"Rise of {text} NLL (nats per token)", rise["nll_per_token"], 0.10),
    ]


def sentences(
    comparisons: list[Comparison],
    checks: list[Comparison],
    kl: float,
    reward_accuracy: float,
    weak_accuracy: float,
    selected_steps: dict[int, int],
    flags_found: list[Flag],
) -> list[str]:
    """Return the verdict's five sentences, in the order effect, second opinions, cost, warnings, not shown.

    `checks` are those of SFT against itself; `kl` is PPO's mean KL from SFT in nats per sequence;
    `selected_steps[seed]` is 0 where SFT was selected.
    """
    main = {c.measure.key: c for c in comparisons if c.group == "pooled"}
    sft = next(c for c in comparisons if c.group == "sft" and c.measure.key == "nll")
    seeds = [c for c in comparisons if c.group == "seed" and c.measure.key == "judge_full"]
    ways = {key: direction(comparison) for key, comparison in main.items()}
    changes = {key: change(main[key], ways[key]) for key in main}
    return [
        effect(
            main["judge_full"],
            seeds,
            len(comparisons),
            "judged sentiment",
            "the frozen judge's probability of positive for the full text",
        ),
        _second_opinions(ways, changes),
        _cost(change(sft, direction(sft)), changes, kl),
        warned(warnings(checks, reward_accuracy, weak_accuracy, selected_steps, flags_found)),
        not_shown(
            main,
            ways,
            "that people would prefer these texts, or that they are better reviews: reward model, judge and "
            "VADER are automatic measures of sentiment only",
        ),
    ]


def effect(
    main: Comparison, seeds: list[Comparison], tests: int, what: str, measured_by: str, unit: Unit = PREFIX
) -> str:
    """Say whether PPO improved or worsened `what`, or that neither is shown.

    `main` is the pooled comparison, `seeds` those of single seeds, `tests` the size of the family.
    """
    result, way = main.result, direction(main)
    new_seeds = f", over new seeds {interval(*result.new_seeds)}" if result.new_seeds else ""
    measured = (
        f"{measured_by} differs from SFT's by "
        f"{signed(result.mean)} (95% interval {interval(*main.interval)}{new_seeds}, Holm-adjusted p "
        f"{_equals(main.adjusted_p)}, {result.n} {unit.many})"
    )
    if way:
        scope = f" in these {len(seeds)} runs" if only_here(main) else ""
        lead = f"**PPO {'improved' if way > 0 else 'worsened'} {what}{scope}**: {measured}"
    else:
        lead = f"**An effect of PPO on {what} is not shown**: {measured}; {_why_not(main, tests)}"
        if result.detectable > 0:
            lead += f", and with 80% power this design finds {number(result.detectable)} or more"
    return f"{lead}; {_alone(seeds)}."


def _why_not(main: Comparison, tests: int) -> str:
    low, high = _bounds(main)
    if low <= 0 <= high:
        return "the interval includes 0"
    if not _same_sign(main):
        return "the seeds disagree in sign"
    return f"the interval leaves out 0, but p is not below {ALPHA} after Holm over {tests} tests"


def _alone(seeds: list[Comparison]) -> str:
    if not seeds:
        return "one PPO seed was run, so variation between training runs is not measured"
    ways = [direction(seed) for seed in seeds]
    return (
        f"taken alone, {ways.count(1)} of {len(ways)} seeds show a rise, {ways.count(-1)} a fall, "
        f"{ways.count(0)} neither"
    )


def _second_opinions(ways: dict[str, int], changes: dict[str, str]) -> str:
    judge, vader = ways["judge_full"], ways["vader_full"]
    if judge == vader:
        relation = "VADER, a word list that needs no training, agrees" if judge else "VADER shows none either"
    elif judge * vader < 0:
        relation = "VADER, a word list that needs no training, points the other way"
    else:
        relation = "VADER does not confirm it" if judge else "VADER alone shows a change"
    return (
        f"**Second opinions**: {relation} (full text: {changes['vader_full']}; continuation: "
        f"{changes['vader_continuation']}); the judge's probability for the continuation alone: "
        f"{changes['judge_continuation']}."
    )


def _cost(sft_nll: str, changes: dict[str, str], kl: float) -> str:
    return (
        f"**Cost**: review NLL in nats per token, from base to SFT: {sft_nll}; from SFT to PPO: "
        f"{changes['nll']}; PPO lies {number(kl, 2)} nats per sequence (KL) from SFT; length in tokens: "
        f"{changes['length']}; repetition: {changes['repetition']}."
    )


def warnings(
    checks: list[Comparison],
    accuracy: float,
    weak_accuracy: float,
    selected_steps: dict[int, int],
    flags_found: list[Flag],
) -> list[str]:
    """Return what a reader has to know before the numbers: failed checks, a weak signal, raised flags."""
    found = []
    failed = [check for check in checks if direction(check)]
    if failed:
        listed = ", ".join(f"{check.measure.name} {change(check, direction(check))}" for check in failed)
        found.append(
            f"the self-check fails: SFT differs from itself ({listed}), which chance does in at most one run "
            "of twenty; until it is explained, no difference of this report can be relied on"
        )
    if accuracy < weak_accuracy:
        found.append(
            f"the reward model is weak (accuracy {number(accuracy)}, below {number(weak_accuracy, 2)}), so "
            "PPO was trained on a poor signal"
        )
    unmoved = [str(seed) for seed, step in selected_steps.items() if step == 0]
    if unmoved:
        found.append(
            f"validation selected step 0 for seed {', '.join(unmoved)}: no checkpoint beat SFT there, and "
            "that PPO policy is SFT itself"
        )
    raised = [flag for flag in flags_found if flag.raised]
    if raised:
        names = "; ".join(f"{f.name}: {number(f.value)}, above {number(f.threshold, 2)}" for f in raised)
        found.append(f"over-optimisation flags raised by the worst seed (section 4): {names}")
    return found


def warned(found: list[str]) -> str:
    """Return the sentence of `warnings`, or that no flag is raised."""
    return f"**Warnings**: {'; '.join(found) or 'no flag of section 4 is raised'}."


def not_shown(main: dict[str, Comparison], ways: dict[str, int], beyond: str) -> str:
    """Say which differences are not shown, which not of other seeds, and what lies beyond any measure."""
    silent = [main[key].measure.name for key, way in ways.items() if way == 0]
    listed = f"a difference between PPO and SFT in {', '.join(silent)}; " if silent else ""
    here = [main[key].measure.name for key, way in ways.items() if way and only_here(main[key])]
    if here:
        listed += (
            f"that other PPO seeds change {', '.join(here)} too (the intervals over new seeds cover 0); "
        )
    if listed:
        listed += "and "
    return f"**Not shown**: {listed}{beyond}."


def only_here(comparison: Comparison) -> bool:
    """Tell whether the interval over new seeds covers 0: what is shown is shown of the seeds at hand."""
    new_seeds = comparison.result.new_seeds
    return new_seeds is not None and new_seeds.low <= 0 <= new_seeds.high


def _equals(p: float) -> str:
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"
