"""The report's sections on results, as markdown: numbers in, text out. `rlhf.appendix` holds the rest."""

import pandas as pd

from rlhf import markdown as md
from rlhf.comparisons import Comparison, Outcome
from rlhf.textmetrics import Phrase
from rlhf.verdict import ALPHA, Flag

TITLES = {"base": "base", "sft": "SFT", "ppo": "PPO, mean"}
SHARES = {
    "empty_rate": "Empty",
    "limit_rate": "Cut at the token limit",
}
MEANS = {
    "judge_full": ("Judged probability, full text", 3),
    "judge_continuation": ("Judged probability, continuation", 3),
    "vader_full": ("VADER compound, full text", 3),
    "vader_continuation": ("VADER compound, continuation", 3),
    "reward": ("Reward [-1, 1]", 3),
    "kl": ("KL from SFT (nats per sequence)", 2),
    "nll_per_token": ("Review NLL (nats per token)", 3),
    "perplexity": ("Review perplexity", 1),
    "length": ("Length (tokens)", 1),
    "repetition": ("Repetition (share)", 3),
    "distinct_1": ("Distinct words (distinct-1)", 3),
    "distinct_2": ("Distinct pairs of words (distinct-2)", 3),
    "self_similarity": ("Self-similarity of continuations", 3),
}


def title_of(policy: str) -> str:
    """Return a policy's name as the report prints it."""
    return TITLES.get(policy) or f"PPO {policy.removeprefix('ppo-')}"


def count_of(n: int, what: str) -> str:
    """Return "1 seed", "2 seeds"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def opening(title: str, policy: str, prefix_tokens: int, response_tokens: int, seeds: int) -> str:
    """The title, and what was done in two sentences."""
    return f"""# {md.escape(title)}

The policy {md.escape(policy)} continues the first {prefix_tokens} tokens of a review with up to
{response_tokens} tokens. SFT teaches it reviews; a reward model learns human sentiment labels; PPO
({count_of(seeds, "seed")}) then raises that reward, held near SFT by a KL penalty. A judge that PPO never
sees scores the result on held-out prefixes."""


def verdict(sentences: list[str]) -> str:
    """Section 1: the sentences of `rlhf.verdict`, and the rule that they follow."""
    bullets = "\n".join(f"- {sentence}" for sentence in sentences)
    return f"""## 1. Verdict

{bullets}

These sentences are derived by rule from the numbers below. A change counts as shown only if both of its 95%
intervals lie on one side of 0, its Holm-adjusted p is below {ALPHA}, and no PPO seed points the other way."""


def policies(table: pd.DataFrame, prefixes: int, samples: int, reviews: int) -> str:
    """Section 2: one column per policy; `table` is `comparisons.summarise`'s."""
    shown = table if table.index.str.startswith("ppo-").sum() > 1 else table.drop(index="ppo")
    columns = [row for _, row in shown.iterrows()]
    rows = [
        ["Positive, full text", *(_rate(row, "positive_rate") for row in columns)],
        ["Positive, continuation", *(_rate(row, "positive_rate_continuation") for row in columns)],
        *([name, *(md.percent(row[key]) for row in columns)] for key, name in SHARES.items()),
        *([name, *(md.number(row[key], digits) for row in columns)] for key, (name, digits) in MEANS.items()),
    ]
    how = "Clopper-Pearson" if samples == 1 else "bootstrap over prefixes, each with all its samples"
    caption = (
        "Positive rates and likelihood of the policies. Look whether the dots for PPO lie right of SFT on "
        f"the left and not to the right of it in the NLL. n = {prefixes} prefixes with "
        f"{count_of(samples, 'sample')}; bars: 95% intervals of each rate on its own ({how}); NLL on "
        f"{reviews} held-out reviews, without interval"
    )
    return f"""## 2. Policies

{md.table(["", *(title_of(name) for name in shown.index)], rows)}

Positive: judged probability of at least 0.5 and not empty. Brackets: 95% intervals ({how}). {prefixes} test
prefixes, {count_of(samples, "sample")} each, under the same random numbers for every policy; review NLL
includes the EOS token and comes from {reviews} held-out reviews.

{md.figure(1, "policies", caption)}"""


def _rate(row: pd.Series, name: str) -> str:
    low, high = (md.number(100 * row[f"{name}_{end}"], 1) for end in ("low", "high"))
    return f"{md.percent(row[name])} [{low}, {high}]"


def differences(
    found: list[Comparison], checks: list[Comparison], outcomes: list[Outcome], noise_ratio: float | None
) -> str:
    """Section 3: paired differences, the self-check, and what common random numbers bring."""
    groups = {name: [c for c in found if c.name == name] for name in dict.fromkeys(c.name for c in found)}
    main = [name for name, group in groups.items() if group[0].group != "seed"]
    seeds = [name for name in groups if name not in main]
    n = found[0].result.n
    caption = (
        "Paired differences between policies. Look for intervals that do not cross the line at 0 (filled "
        f"marks do not, hollow ones do); diamonds pool the PPO seeds. n = {n} prefixes (NLL: "
        f"{found[-1].result.n} reviews); bars: 95% intervals, BCa, for the diamonds hierarchical over "
        "prefixes, seeds and samples"
    )
    parts = [
        "## 3. Paired differences",
        "Mean over prefixes of treatment - control on the same prefix and the same random numbers. Holm p "
        f"adjusts over the family of all {len(found)} tests of this section except the self-check. "
        "Detectable: the smallest true difference found with 80% power at this n. n needed: prefixes at "
        "which the observed difference would be that size. IQM: interquartile mean, d: Cohen's d of the "
        "paired differences.",
        *(f"**{name}**\n\n{_difference_table(groups[name])}" for name in main),
        _pooled_note(groups[main[-1]]),
        *(md.folded(f"{name}, this seed alone", _difference_table(groups[name])) for name in seeds),
        md.figure(2, "differences", caption),
        _outcome_table(outcomes),
        _self_check(checks, noise_ratio),
    ]
    return "\n\n".join(parts)


def _difference_table(group: list[Comparison]) -> str:
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


def _pooled_note(pooled: list[Comparison]) -> str:
    spread = [c for c in pooled if c.result.between_seed_sd is not None]
    if not spread:
        return (
            "One PPO seed: the percentile interval resamples prefixes and samples; variation between "
            "training runs is not measured."
        )
    listed = ", ".join(
        f"{c.measure.name} {md.number(c.result.between_seed_sd, c.measure.digits)}" for c in spread
    )
    return (
        "The pooled percentile interval resamples prefixes, seeds and samples; BCa and p hold the seeds "
        "fixed. With so few seeds it is somewhat too narrow where they differ. Standard deviation between "
        f"seeds: {listed}."
    )


def _outcome_table(outcomes: list[Outcome]) -> str:
    rows = [[o.name, *(str(n) for n in (o.n, o.gained, o.lost)), md.p_value(o.p_value)] for o in outcomes]
    header = ["Judged positive, full text", "Prefixes", "Gained", "Lost", "Exact p"]
    note = "McNemar's exact test on the first sample of each prefix; not adjusted, no claim rests on it."
    return f"{md.table(header, rows)}\n\n{note}"


def _self_check(checks: list[Comparison], noise_ratio: float | None) -> str:
    if not checks:
        return "No self-check: it needs at least two samples per prefix."
    text = (
        "**Self-check**: SFT against itself under another noise stream, first sample against second. "
        "Nothing should show; p is not adjusted, so about one in twenty falls below 0.05 by "
        f"chance.\n\n{_difference_table(checks)}"
    )
    if noise_ratio is None:
        return text
    return (
        f"{text}\n\nCommon random numbers: the variance of a PPO - SFT difference in judged probability is "
        f"{md.number(noise_ratio, 2)} of that under independent noise (one sample per prefix)."
    )


def overoptimisation(flags: list[Flag], phrases: dict[str, list[Phrase]], prefixes: int, samples: int) -> str:
    """Section 4: flags with their thresholds; `phrases[reference]`: what PPO says more often."""
    rows = [
        [
            flag.name,
            md.number(flag.value),
            md.number(flag.threshold, 2),
            "**raised**" if flag.raised else "no",
        ]
        for flag in flags
    ]
    caption = (
        "Reward against KL and against the judge. Left: a curve that bends flat buys KL without reward "
        f"(rings: selected steps). Right: dots below the line are scored higher by the reward "
        f"model than by the judge. n = {prefixes} test prefixes with {count_of(samples, 'sample')}; means "
        "without interval (section 3 has the intervals)"
    )
    parts = [
        "## 4. Over-optimisation",
        md.table(["Flag (worst PPO seed)", "Value", "Raised above", "State"], rows),
        "The thresholds are conventions of this project, the same for every run. A flag is a reason to read "
        "the examples, not a proof.",
        md.figure(3, "overoptimisation", caption),
        *(_phrase_table(reference, listed) for reference, listed in phrases.items()),
    ]
    return "\n\n".join(parts)


def _phrase_table(reference: str, listed: list[Phrase]) -> str:
    if not listed:
        return f"No phrase of three words is used more by PPO than by {reference}."
    header = [f"Phrase overused against {reference} (share of continuations)", "PPO", reference]
    rows = [
        [md.escape(phrase, 80), md.percent(share), md.percent(reference_share)]
        for phrase, share, reference_share in listed
    ]
    return md.table(header, rows)
