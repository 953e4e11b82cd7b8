"""The report on synthetic results: its numbers by hand, its markdown whole, its bytes the same again."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_results import judged_rows, likelihoods, write_inputs

from rlhf import errors, record
from rlhf.report import appendix, comparisons, levels, tables
from rlhf.report import markdown as md
from stages import report

HOSTILE = (
    "a | b || c",
    "line\nbreak\r\nand\rmore\u2028end",
    "`code` ``` fence",
    "</details><script>alert(1)</script><!-- --> &amp; &#124;",
    "# heading * _em_ [link](http://x) ![i](y) $x$ ~~s~~ \\| \\",
    "🙂👩‍👩‍👧 \u202eright to left\u202c é \x00\x07",
    "NA",
    "",
    " ,\"quoted\", 'text' ",
)

# Numbers


def test_the_table_of_policies_by_hand():
    rows = judged_rows(seeds=(1,), prefixes=2, samples=1)
    rows["judge_full"] = [0.6, 0.4, 0.6, 0.9, 0.5, 0.49]
    rows["empty"] = [False, False, False, True, False, False]
    rows["ended"] = [True, False, True, True, True, True]
    policies = ["base", "sft", "ppo-1"]
    nll = {p: pd.DataFrame({"id": ["a", "b"], "nll": [4.0, 5.0], "tokens": [1, 2]}) for p in policies}
    table = levels.summarise(comparisons.prepare(rows, policies), nll, 42, 100)
    assert table["positive_rate"].tolist() == [0.5, 0.5, 0.5, 0.5]  # empty is never positive, 0.5 is
    assert table.loc["base", "limit_rate"] == 0.5 and table.loc["sft", "empty_rate"] == 0.5
    assert table.loc["base", "nll_per_token"] == 3.0
    assert table.loc["ppo", "perplexity"] == pytest.approx(np.exp(3.0))
    low, high = table.loc["base", ["positive_rate_low", "positive_rate_high"]]
    assert (low, high) == pytest.approx((0.01258, 0.98742), abs=1e-5)  # Clopper-Pearson, 1 of 2
    # Of two prefixes 0.6 and 0.4 every resample mean is 0.4, 0.5 or 0.6, a quarter of them at each end.
    assert table.loc["base", ["judge_full_low", "judge_full_high"]].tolist() == pytest.approx([0.4, 0.6])


def test_the_likelihood_of_reviews_is_per_token_of_all_and_linearised():
    # R = (4 + 5) / (1 + 2) = 3; the values are 3 + (4 - 3) / 1.5 and 3 + (5 - 6) / 1.5.
    by_hand = comparisons.likelihood_per_token(pd.DataFrame({"nll": [4.0, 5.0], "tokens": [1, 2]}))
    assert by_hand == pytest.approx([3 + 2 / 3, 3 - 2 / 3], abs=1e-12)
    likelihood = likelihoods(["sft"], rows=400)["sft"]
    values = comparisons.likelihood_per_token(likelihood)
    rng = np.random.default_rng(0)
    drawn = likelihood.to_numpy()[rng.integers(400, size=(4000, 400))][:, :, 1:].astype(float).sum(1)
    ratios = drawn[:, 0] / drawn[:, 1]  # the second route: numerator and denominator resampled together
    assert values.std() / 20 == pytest.approx(ratios.std(), rel=0.05)


def test_policies_with_other_reviews_are_refused():
    rows = comparisons.prepare(judged_rows(seeds=(1,), prefixes=3), ["base", "sft", "ppo-1"])
    nll = likelihoods(["base", "sft", "ppo-1"])
    nll["ppo-1"] = nll["ppo-1"].assign(tokens=nll["ppo-1"]["tokens"] + 1)
    with pytest.raises(errors.UserError, match="validation NLL of ppo-1"):
        comparisons.scores(rows, nll)


def checked(again=0.0, **shifts):
    """Self-check and noise of synthetic rows."""
    judged = judged_rows(again=again, **shifts)
    policies = list(dict.fromkeys(judged["policy"]))
    nll = likelihoods([name for name in policies if name != "sft-again"])
    values = comparisons.scores(comparisons.prepare(judged, policies), nll)
    seeds = tuple(int(name[4:]) for name in policies if name.startswith("ppo-"))
    return comparisons.self_check(values, 42, 500), comparisons.noise(values, seeds, 42, 500)


def test_sft_against_itself_is_a_family_of_its_own_over_every_measure_of_the_texts():
    checks, noise = checked(prefixes=60)
    assert [c.measure.key for c in checks] == [m.key for m in comparisons.MEASURES if m.key != "nll"]
    assert all(c.adjusted_p == 1.0 or c.adjusted_p >= c.result.p_value for c in checks)
    text = tables._self_check(checks)
    assert "no difference is shown, as it must be" in text and "these 7 tests" in text
    failed = tables._self_check(checked(prefixes=60, again=0.2)[0])
    assert "**it fails**: a difference is shown in Judge, full text, Judge, continuation." in failed
    # Shared noise 0.05, own noise 0.03: (2 x 0.05^2 + 2 x 0.03^2) / (2 x 0.03^2) = 3.8 for the judge.
    assert noise[0].ratio.interval.low < 3.8 < noise[0].ratio.interval.high
    assert [n.measure for n in noise] == [c.measure for c in checks]


def test_without_a_second_sample_of_sft_one_sentence_says_so():
    checks, noise = checked(again=None)
    assert checks == [] and noise == []
    assert tables._self_check([]).startswith("No self-check: SFT was not sampled a second time")


def test_noise_that_is_not_shared_brings_nothing_and_no_variance_no_number():
    alike, policies_are_one = checked(prefixes=200, own_noise=0.5)[1], checked(own_noise=0.0)[1]
    repetition = alike[-1]  # the noise of repetition is each policy's own
    assert repetition.ratio.interval.low < 1 < repetition.ratio.interval.high
    assert policies_are_one[0].ratio is None
    assert "| Judge, full text | – | – |" in tables._noise_table(policies_are_one)


def test_the_metrics_are_flat_ordered_and_say_their_unit():
    policies = ["base", "sft", "ppo-1"]
    rows, nll = comparisons.prepare(judged_rows(seeds=(1,)), policies), likelihoods(policies)
    found = comparisons.compare(comparisons.scores(rows, nll), (1,), 42, 200)
    metrics = levels.metrics(levels.summarise(rows, nll, 42, 200), found)
    assert list(metrics)[:3] == ["positive_rate_base", "positive_rate_sft", "positive_rate_ppo"]
    units = ("rate", "nll_per_token", "tokens", "share", "probability", "compound", "score", "nats")
    assert all(any(unit in name for unit in units) for name in metrics)
    assert metrics["nll_per_token_ppo_minus_sft"] == pytest.approx(
        metrics["nll_per_token_ppo"] - metrics["nll_per_token_sft"], abs=1e-12
    )


def test_rows_that_cannot_be_paired_are_refused():
    rows = judged_rows(seeds=(1,), prefixes=3)
    with pytest.raises(errors.UserError, match="judged rows of ppo-1"):
        comparisons.prepare(rows.iloc[:-1], ["base", "sft", "ppo-1"])
    with pytest.raises(errors.UserError, match="at least 2 prefixes"):
        comparisons.prepare(judged_rows(seeds=(1,), prefixes=1), ["base", "sft", "ppo-1"])
    nll = likelihoods(["base", "sft", "ppo-1"])
    nll["sft"] = nll["sft"].iloc[::-1]
    with pytest.raises(errors.UserError, match="validation NLL of sft"):
        comparisons.scores(comparisons.prepare(rows, ["base", "sft", "ppo-1"]), nll)


def test_outcomes_count_gains_and_losses_of_first_samples():
    rows = judged_rows(seeds=(1,), prefixes=3, samples=2)
    rows["judge_full"] = 0.0
    rows.loc[(rows["policy"] == "ppo-1") & (rows["id"] != "test-000"), "judge_full"] = 1.0
    rows.loc[(rows["policy"] == "sft") & (rows["id"] == "test-000"), "judge_full"] = 1.0
    prepared = comparisons.prepare(rows, ["base", "sft", "ppo-1"])
    outcome = comparisons.outcomes(prepared, (1,))[1]
    assert (outcome.n, outcome.gained, outcome.lost, outcome.p_value) == (3, 2, 1, 1.0)


# Markdown


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_is_one_line_without_markup(text):
    shown = md.escape(text)
    assert len(shown.splitlines()) <= 1
    assert not set("|<>`") & set(shown)
    assert not re.search(r"(?<!\\)[*_\[\]$~]", shown)


def test_escaping_keeps_the_words_and_cuts_long_texts():
    assert md.escape("plain, words: 1 (one).") == "plain, words: 1 (one)."
    assert md.escape("a\nb\r\nc") == "a ⏎ b ⏎ c"
    assert md.escape("x" * 30, 10) == "x" * 10 + " …"


def test_numbers_as_they_are_shown():
    assert md.number(-0.0001) == "0.000" and md.signed(0.0001) == "0.000"
    assert md.signed(0.25) == "+0.250" and md.signed(-0.25) == "-0.250"
    assert md.number(float("nan")) == "–" and md.number(None) == "–"
    assert md.percent(0.125) == "12.5%" and md.p_value(0.0) == "< 0.001" and md.p_value(1.0) == "1.000"


def test_a_table_with_a_short_row_is_an_error():
    with pytest.raises(ValueError, match="2 columns"):
        md.table(["a", "b"], [["1"]])


def test_examples_are_in_id_order_then_marked_as_chosen():
    rows = judged_rows(seeds=(1,), judge=(0.0,), prefixes=8, samples=1)
    rows.loc[(rows["policy"] == "ppo-1") & (rows["id"] == "test-005"), "judge_full"] = 1.0
    policies = ["base", "sft", "ppo-1"]
    text = appendix.examples(comparisons.prepare(rows, policies), policies, 3)
    ordered, chosen = text.split("### Largest gains and losses")
    assert ordered.count("**the movie is …**") == 3 and "gain" not in ordered
    assert "not representative" in chosen
    assert chosen.index("(gain +0.") < chosen.index("(loss -")


# The whole stage


def tables_of(text):
    """Every table as a list of lines, told by its line of marks."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if re.fullmatch(r"\|( (:--|--:) \|)+", line):
            end = next(j for j in range(i, len(lines)) if not lines[j].startswith("|"))
            yield lines[i - 1 : end]


@pytest.mark.parametrize(("seeds", "samples", "again"), [((42, 43), 2, 0.0), ((42,), 1, None)])
def test_the_whole_report(tmp_path, monkeypatch, seeds, samples, again):
    write_inputs(tmp_path, seeds, samples, texts=HOSTILE, again=again)
    monkeypatch.chdir(tmp_path)
    report.main()
    text = Path("reports/report.md").read_text(encoding="utf-8")
    tables = list(tables_of(text))
    assert len(tables) > 20
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
    assert all(line in {x for t in tables for x in t} for line in text.split("\n") if line.startswith("|"))
    assert not re.search(r"\bNone\b|(?i:\bnan\b|\binf\b)", text)
    assert str(tmp_path) not in text and str(Path.home()) + "/" not in text
    assert text.count("<details>") == text.count("</details>") and "<script" not in text
    assert text.count("```") == 2
    for number, title in enumerate(
        ("Verdict", "Policies", "Paired differences", "Over-optimisation"), start=1
    ):
        assert f"## {number}. {title}" in text
    for image in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (Path("reports") / image).stat().st_size > 5_000
    assert len(re.findall(r"\*Figure \d\. .*\bn = ", text)) == 7
    metrics = record.read_json("reports/metrics/report.json")
    assert all(isinstance(value, float) for value in metrics.values()) and len(metrics) < 40
    assert metrics["judge_probability_ppo_minus_sft_low"] < metrics["judge_probability_ppo_minus_sft"]
    assert ("**Self-check**" in text) == ("**Common random numbers**" in text) == (again is not None)
    assert "published figures" not in text
    described = record.read_json("reports/environment.json")
    assert all(f"| {md.escape(name)} | {md.escape(value)} |" in text for name, value in described.items())
    assert "snapshot_seconds" not in text


def test_texts_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = judged_rows(seeds=(1,), prefixes=9, samples=1, texts=HOSTILE)
    record.write_csv("artifacts/judged.csv", rows.to_dict("records"))
    pd.testing.assert_frame_equal(comparisons.read_rows("artifacts/judged.csv"), rows)


def test_two_runs_give_the_same_bytes(tmp_path, monkeypatch):
    write_inputs(tmp_path, (42,), 1, prefixes=12)
    monkeypatch.chdir(tmp_path)

    def outputs():
        report.main()
        return {p: p.read_bytes() for p in Path("reports").rglob("*") if p.is_file()}

    assert outputs() == outputs()
