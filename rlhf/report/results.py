"""The sections on results, as markdown: numbers in, text out. `rlhf.report.appendix` holds the rest."""

from typing import Any

import pandas as pd

from rlhf.report import markdown as md
from rlhf.report.trajectory import parting
from rlhf.report.verdict import ALPHA, Flag
from rlhf.textmetrics import Phrase, overused_phrases

RATES = {
    "positive_rate": "Positive, full text",
    "positive_rate_continuation": "Positive, continuation",
}
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


def opening(title: str, policy: str, prefix_tokens: int, response_tokens: int, seeds: int) -> str:
    """The title, and what was done in two sentences."""
    return f"""# {md.escape(title)}

The policy {md.escape(policy)} continues the first {prefix_tokens} tokens of a review with up to
{response_tokens} tokens. SFT teaches it reviews; a reward model learns human sentiment labels; PPO
({md.count(seeds, "seed")}) then raises that reward, held near SFT by a KL penalty. A judge that PPO never
sees scores the result on held-out prefixes."""


def verdict(sentences: list[str]) -> str:
    """Section 1: the sentences of `rlhf.report.verdict`, and the rule that they follow."""
    bullets = "\n".join(f"- {sentence}" for sentence in sentences)
    return f"""## 1. Verdict

{bullets}

These sentences are derived by rule from the numbers below. A change counts as shown only if both of its 95%
intervals lie on one side of 0, its Holm-adjusted p is below {ALPHA}, and no PPO seed points the other way. It
is then shown of the policies trained here; the interval over new seeds speaks for seeds that were not run."""


def policies(table: pd.DataFrame, prefixes: int, samples: int, reviews: int) -> str:
    """Section 2: one column per policy; `table` is `levels.summarise`'s."""
    how = rate_interval(samples, "prefixes")
    caption = (
        "Positive rates and likelihood of the policies. Look whether the dots for PPO lie right of SFT on "
        f"the left and not to the right of it in the NLL. n = {prefixes} prefixes with "
        f"{md.count(samples, 'sample')}, NLL: {reviews} held-out reviews; bars: 95% intervals of each number "
        f"on its own ({how}; NLL: BCa), not of a difference"
    )
    return f"""## 2. Policies

{policy_table(table, RATES, SHARES, MEANS)}

Positive: judged probability of at least 0.5 and not empty. Brackets: 95% intervals of each number on its own
(rates: {how}; means: BCa over prefixes, or reviews for the NLL), the seeds of the mean fixed.
{prefixes} test prefixes, {md.count(samples, "sample")} each, under the same random numbers for every policy.
Review NLL is nats per token over all tokens of {reviews} held-out reviews, EOS included.

{md.figure(1, "policies", caption)}"""


def rate_interval(samples: int, units: str) -> str:
    """Name the interval of a rate, by how many samples each of the `units` has."""
    return "Clopper-Pearson" if samples == 1 else f"bootstrap over {units}, each with all its samples"


def policy_table(
    table: pd.DataFrame, rates: dict[str, str], shares: dict[str, str], means: dict[str, tuple[str, int]]
) -> str:
    """One column per policy, PPO's mean only of several seeds; a row per number: rates, shares, means.

    `rates[column]` and `shares[column]` are names, `means[column]` a name and its digits.
    """
    shown = table if table.index.str.startswith("ppo-").sum() > 1 else table.drop(index="ppo")
    columns = [row for _, row in shown.iterrows()]
    rows = [
        *([name, *(_rate(row, key) for row in columns)] for key, name in rates.items()),
        *([name, *(md.percent(row[key]) for row in columns)] for key, name in shares.items()),
        *([name, *(_mean(row, key, digits) for row in columns)] for key, (name, digits) in means.items()),
    ]
    return md.table(["", *(title_of(name) for name in shown.index)], rows)


def _rate(row: pd.Series, name: str) -> str:
    low, high = (md.number(100 * row[f"{name}_{end}"], 1) for end in ("low", "high"))
    return f"{md.percent(row[name])} [{low}, {high}]"


def _mean(row: pd.Series, name: str, digits: int) -> str:
    text = md.number(row[name], digits)
    if f"{name}_low" not in row or row[f"{name}_low"] == row[f"{name}_high"]:
        return text
    return f"{text} {md.interval(row[f'{name}_low'], row[f'{name}_high'], digits)}"


def overoptimisation(
    flags: list[Flag],
    path: dict[int, pd.DataFrame],
    phrases: dict[str, list[Phrase]],
    prefixes: int,
    samples: int,
) -> str:
    """Section 4: flags with their thresholds, `trajectory.along`'s checks, what PPO says more often.

    `phrases[reference]` are those that PPO uses more often than the reference.
    """
    n = int(next(iter(path.values()))["n"].min())
    caption = (
        "Reward and judge against KL along training, and against each other at the end. Left and middle "
        "share their scale: where the left curve climbs and the middle one does not, reward and judge part "
        f"(rings: selected steps); n = {n} validation prefixes, change from SFT (step 0) with 95% BCa "
        "intervals. Right: dots below the line are scored higher by the reward model than by the judge; n = "
        f"{prefixes} test prefixes with {md.count(samples, 'sample')}, means with 95% BCa intervals"
    )
    parts = [
        "## 4. Over-optimisation",
        flag_table(flags),
        md.figure(3, "overoptimisation", caption),
        parting(path),
        md.folded("Each check on the validation prefixes", _check_table(path)),
        phrase_tables(phrases, "continuations"),
    ]
    return "\n\n".join(parts)


def flag_table(flags: list[Flag]) -> str:
    """The flags of `verdict`, raised or not, and what they are worth."""
    rows = [
        [
            flag.name,
            md.number(flag.value),
            md.number(flag.threshold, 2),
            "**raised**" if flag.raised else "no",
        ]
        for flag in flags
    ]
    return (
        f"{md.table(['Flag (worst PPO seed)', 'Value', 'Raised above', 'State'], rows)}\n\n"
        "The thresholds are conventions of this project, the same for every run. A flag is a reason to read "
        "the examples, not a proof."
    )


def overused(rows: pd.DataFrame) -> dict[str, list[Phrase]]:
    """Return the phrases of three words that PPO, all seeds together, uses more often than SFT and base."""
    texts = rows["continuation"]
    ppo = texts[rows["policy"].str.startswith("ppo-")].tolist()
    return {
        title_of(name): overused_phrases(ppo, texts[rows["policy"] == name].tolist())
        for name in ("sft", "base")
    }


def phrase_tables(phrases: dict[str, list[Phrase]], texts: str) -> str:
    """What PPO says more often than each reference; `texts` names what PPO wrote."""
    parts = [_phrase_table(reference, listed, texts) for reference, listed in phrases.items()]
    if any(phrases.values()):
        parts.append(
            f"Shares are of all {texts}, those of the PPO seeds together. The phrases are the ten of "
            "the largest difference among all there are, so that some differ by chance: a description, not a "
            "test."
        )
    return "\n\n".join(parts)


def _check_table(path: dict[int, pd.DataFrame]) -> str:
    names = {"reward": "Reward as probability", "judge": "Judge", "vader": "VADER"}
    return check_table(path, names, "Reward, judge and VADER (full text)")


def check_table(path: dict[int, pd.DataFrame], names: dict[str, str], what: str) -> str:
    """A row per check of `trajectory.along`; `names[gain]` heads the column of that change, `what` is all."""
    rows = [
        [
            f"PPO {seed}",
            str(row.step),
            md.number(row.kl, 2),
            *(_gain(row, name) for name in names),
            md.number(row.length, 1),
            md.percent(row.ended_rate),
            md.number(row.repetition),
            md.number(row.distinct_2),
        ]
        for seed, checks in path.items()
        for row in checks.itertuples()
    ]
    header = ["", "Step", "KL", *names.values(), "Length", "Ended", "Repetition", "Distinct-2"]
    return (
        f"{what}: change from step 0, 95% BCa. KL in nats per sequence, length "
        f"in tokens, ended: share of texts that stop by EOS.\n\n{md.table(header, rows)}"
    )


def _gain(row: Any, name: str) -> str:
    if row.step == 0:
        return "–"
    mean, low, high = (getattr(row, f"{name}_{part}") for part in ("gain", "low", "high"))
    return f"{md.signed(mean)} {md.interval(low, high)}"


def _phrase_table(reference: str, listed: list[Phrase], texts: str) -> str:
    if not listed:
        return f"No phrase of three words is used more by PPO than by {reference}."
    header = [f"Phrase overused against {reference} (share of {texts})", "PPO", reference]
    rows = [
        [md.escape(phrase, 80), md.percent(share), md.percent(reference_share)]
        for phrase, share, reference_share in listed
    ]
    return md.table(header, rows)
