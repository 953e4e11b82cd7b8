"""Section 3 of the report, as markdown: tables of paired differences and of what they rest on."""

from rlhf.report import markdown as md
from rlhf.report.comparisons import PREFIX, Comparison, Noise, Outcome, Unit
from rlhf.report.verdict import direction


def differences(
    found: list[Comparison],
    checks: list[Comparison],
    noise: list[Noise],
    outcomes: list[Outcome],
    resamples: int,
    unit: Unit = PREFIX,
    outcome: str = "Judged positive, full text",
) -> str:
    """Section 3: paired differences, the self-check, and what common random numbers bring."""
    groups = {name: [c for c in found if c.name == name] for name in dict.fromkeys(c.name for c in found)}
    main = [name for name, group in groups.items() if group[0].group != "seed"]
    seeds = [name for name in groups if name not in main]
    n = found[0].result.n
    caption = (
        "Paired differences between policies. Look for intervals that do not cross the line at 0 (filled "
        f"marks do not, hollow ones do); diamonds pool the PPO seeds. n = {n} {unit.many} (NLL: "
        f"{found[-1].result.n} {unit.texts}); bars: 95% intervals (BCa; for diamonds thick: percentile over "
        f"{unit.many}, seeds and samples, thin: over new seeds)"
    )
    parts = [
        "## 3. Paired differences",
        f"Mean over {unit.many} of treatment - control on the same {unit.one} and the same random numbers. "
        f"Holm p adjusts over the family of all {len(found)} tests of this section except the self-check; p "
        f"{_resolution(n, resamples, len(found))}. Detectable: the smallest true difference found with 80% "
        f"power at this n, before Holm and with the seeds fixed. n needed: {unit.many} at which the observed "
        "difference would be that size. IQM: interquartile mean, d: Cohen's d of the paired differences. The "
        f"NLL has one value per {unit.text}, linearised, so that its mean is the difference of section 2's "
        "NLL.",
        *(f"**{name}**\n\n{difference_table(groups[name])}" for name in main),
        between_seeds(groups[main[-1]], [name.removesuffix(" - SFT") for name in seeds], unit),
        *(md.folded(f"{name}, this seed alone", difference_table(groups[name])) for name in seeds),
        md.figure(2, "differences", caption),
        _outcome_table(outcomes, outcome, unit),
        _self_check(checks, unit),
        *([_noise_table(noise, unit)] if noise else []),
    ]
    return "\n\n".join(parts)


def _resolution(n: int, resamples: int, tests: int) -> str:
    if 2**n <= resamples:
        return f"counts all 2^{n} sign flips"
    p = 1 / (resamples + 1)
    return (
        f"comes from {resamples} random sign flips, so that none is below {p:.1g} and no Holm p below "
        f"{tests * p:.1g}"
    )


def difference_table(group: list[Comparison]) -> str:
    """One row per measure: the difference, its intervals, p-values, effect size and power."""
    header = [
        "Measure (unit)",
        "Difference",
        "IQM",
        "95% BCa",
        "95% percentile",
        "p",
        "Holm p",
        "d",
        "Detectable",
        "n needed",
    ]
    return md.table(header, [_difference_row(comparison) for comparison in group])


def _difference_row(comparison: Comparison) -> list[str]:
    measure, result = comparison.measure, comparison.result
    return [
        f"{measure.name} ({measure.unit})",
        md.signed(result.mean, measure.digits),
        md.signed(comparison.interquartile_mean, measure.digits),
        md.interval(*comparison.bca, measure.digits),
        md.interval(*comparison.percentile, measure.digits),
        md.p_value(result.p_value),
        md.p_value(comparison.adjusted_p),
        md.number(result.effect_size, 2),
        md.number(result.detectable, measure.digits),
        md.number(result.n_needed, 0),
    ]


def between_seeds(pooled: list[Comparison], seeds: list[str], unit: Unit = PREFIX) -> str:
    """How far the PPO seeds, named as printed, differ; the interval over new seeds; a row per measure."""
    if not all(c.result.new_seeds for c in pooled):
        return (
            f"One PPO seed: the percentile interval resamples {unit.many} and samples; variation between "
            "training runs is not measured."
        )
    rows = [
        [
            f"{c.measure.name} ({c.measure.unit})",
            *(md.signed(mean, c.measure.digits) for mean in c.result.seed_means),
            md.number(c.result.between_seed_sd, c.measure.digits),
            md.interval(*c.result.new_seeds, c.measure.digits),
        ]
        for c in pooled
    ]
    return (
        f"The pooled percentile interval resamples {unit.many}, seeds and samples; BCa and p hold the seeds "
        f"fixed. So few as {md.count(len(seeds), 'seed')} show only part of how far seeds differ: the "
        "percentile interval is too narrow for seeds that were not run. The interval over new seeds adds the "
        f"variances of the seeds' and of the {unit.many}' mean differences, each under its own t quantile "
        "(Banerjee 1960); it covers at least 95% if effects of seeds are normal.\n\n"
        f"{md.table([md.escape(pooled[0].name), *seeds, 'SD of seeds', '95% over new seeds'], rows)}"
    )


def _outcome_table(outcomes: list[Outcome], outcome: str, unit: Unit) -> str:
    rows = [[o.name, *(str(n) for n in (o.n, o.gained, o.lost)), md.p_value(o.p_value)] for o in outcomes]
    header = [outcome, unit.many.capitalize(), "Gained", "Lost", "Exact p"]
    note = f"McNemar's exact test on the first sample of each {unit.one}; not adjusted, no claim rests on it."
    return f"{md.table(header, rows)}\n\n{note}"


def _self_check(checks: list[Comparison], unit: Unit = PREFIX) -> str:
    if not checks:
        return "No self-check: SFT was not sampled a second time under other random numbers."
    failed = [check.measure.name for check in checks if direction(check)]
    state = (
        f"**it fails**: a difference is shown in {', '.join(failed)}"
        if failed
        else "no difference is shown, as it must be"
    )
    return (
        f"**Self-check**: SFT against itself under other random numbers, same {unit.many} and number of "
        f"samples. By the rule of section 1, {state}. Holm p adjusts over these {len(checks)} tests. The "
        "noise is not shared here, which widens the intervals.\n\n"
        f"{difference_table(checks)}"
    )


def _noise_table(noise: list[Noise], unit: Unit = PREFIX) -> str:
    rows = [
        [n.measure.name, md.number(n.ratio and n.ratio.value, 2), md.interval(*n.ratio.interval, 2)]
        if n.ratio
        else [n.measure.name, "–", "–"]
        for n in noise
    ]
    header = ["PPO - SFT", f"Times the {unit.many}, independent noise", "95% interval"]
    return (
        f"**Common random numbers**: the variance over {unit.many} of PPO - SFT again (independent noise) "
        "over that of PPO - SFT (the same noise), pooled over seeds. With independent noise the same "
        f"precision needs so many times the {unit.many}; 1 means that sharing the noise brings nothing. "
        f"Interval: percentile, over {unit.many}.\n\n{md.table(header, rows)}"
    )
