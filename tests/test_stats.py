"""Every statistic by hand, by a second route, under invariances, at its edges."""

import itertools
import json
import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rlhf import resampling, stats


def generator(seed=0):
    return np.random.default_rng(seed)


def test_paired_difference_by_hand():
    # d = 2, 3, 0, 3: mean 8/4 = 2; sd = sqrt((0 + 1 + 4 + 1) / 3) = sqrt(2); effect size 2 / sqrt(2).
    # Of 16 flips only +++ and --- on the three others reach |sum| 8, with either sign of the 0: 4/16.
    # z_.975 + z_.8 = 1.9599640 + 0.8416212 = 2.8015852; detectable = 2.8015852 sqrt(2) / sqrt(4) = 1.9810199.
    # n needed = (2.8015852 sqrt(2) / 2)^2 = 3.92, so 4.
    found = stats.paired_difference([5, 7, 6, 10], [3, 4, 6, 7], generator())
    assert (found.n, found.mean, found.p_value, found.n_needed) == (4, 2.0, 0.25, 4)
    assert found.effect_size == pytest.approx(math.sqrt(2), abs=1e-12)
    assert found.detectable == pytest.approx(1.9810199, abs=5e-8)


def exact_bca(d):
    """Efron's BCa and percentile intervals over all n^n resamples, straight from the textbook formulas."""
    means = np.array([np.mean(drawn) for drawn in itertools.product(d, repeat=len(d))])
    below = (np.mean(means < d.mean() - 1e-9) + np.mean(means < d.mean() + 1e-9)) / 2
    jackknife = np.array([np.delete(d, i).mean() for i in range(len(d))])
    centred = jackknife.mean() - jackknife
    z0, a = scipy_stats.norm.ppf(below), (centred**3).sum() / (6 * (centred**2).sum() ** 1.5)
    z = z0 + scipy_stats.norm.ppf([0.025, 0.975])
    return np.quantile(means, scipy_stats.norm.cdf(z0 + z / (1 - a * z))), np.quantile(means, [0.025, 0.975])


def test_intervals_equal_the_enumerated_bootstrap():
    d = np.array([0.0, 1.0, 2.0, 4.0, 13.0])
    found = stats.paired_difference(d, np.zeros(5), generator(), 200_000)
    bca, percentile = exact_bca(d)
    # The means are multiples of 1/5, so that enough resamples give the very same quantiles.
    assert found.bca == pytest.approx(bca, abs=1e-9)
    assert found.percentile == pytest.approx(percentile, abs=1e-9)
    assert abs(bca - percentile).min() >= 0.2


def test_p_value_enumerates_every_flip_or_counts_itself():
    d = generator(3).normal(0.4, 1, size=10)
    flips = np.array(list(itertools.product([-1, 1], repeat=10)))
    exact = np.mean(abs(flips @ d) >= abs(d.sum()) - 1e-9)
    assert stats.paired_difference(d, np.zeros(10), generator(), 1024).p_value == exact
    drawn = stats.paired_difference(d, np.zeros(10), generator(), 1023).p_value
    assert drawn != exact
    assert abs(drawn - exact) < 4 * math.sqrt(exact * (1 - exact) / 1023)
    # All d positive: no random flip of 40 reaches the observed mean, and the observed one counts itself.
    assert stats.paired_difference(np.arange(1, 41), np.zeros(40), generator(), 999).p_value == 1 / 1000


def test_detectable_has_eighty_percent_power_and_n_needed_is_the_first_that_reaches_it():
    d = generator(1).normal(0.05, 1, size=256)
    found = stats.paired_difference(d, np.zeros(256), generator(), 100)
    shift = found.detectable / d.std(ddof=1) * 16
    power = scipy_stats.nct.sf(scipy_stats.t.ppf(0.975, 255), 255, shift)  # the exact t test's
    assert 0.795 < power < 0.8
    at = [found.detectable * math.sqrt(256 / n) for n in (found.n_needed - 1, found.n_needed)]
    assert at[0] > abs(found.mean) >= at[1]


def test_paired_difference_swaps_shifts_scales_and_ignores_row_order():
    treatment, control = generator(4).beta(2, 1, size=(2, 12))
    found = stats.paired_difference(treatment, control, generator(), 5000)
    swapped = stats.paired_difference(control, treatment, generator(), 5000)
    assert swapped.mean == -found.mean and swapped.p_value == found.p_value
    moved = stats.paired_difference(4 * treatment + 3, 4 * control, generator(), 5000)
    for name in ("bca", "percentile"):
        interval = getattr(found, name)
        assert getattr(swapped, name) == pytest.approx((-interval.high, -interval.low), abs=1e-11)
        assert getattr(moved, name) == pytest.approx([4 * end + 3 for end in interval], abs=1e-10)
    shuffled = stats.paired_difference(treatment[::-1], control[::-1], generator(), 5000)
    for name in ("n", "mean", "p_value", "n_needed"):  # the resamples are others
        assert getattr(shuffled, name) == getattr(found, name)
    assert shuffled.effect_size == pytest.approx(found.effect_size, abs=1e-14)
    assert stats.paired_difference(treatment, control, generator(1), 5000).bca != found.bca


def test_pairing_narrows_the_interval_and_mean_interval_is_that_of_the_differences():
    control = generator(5).normal(size=40)
    treatment = control + generator(6).normal(0.1, 0.1, size=40)
    paired = stats.paired_difference(treatment, control, generator(), 500).bca
    broken = stats.paired_difference(treatment, control[::-1], generator(), 500).bca
    assert broken.high - broken.low > 5 * (paired.high - paired.low)
    assert stats.mean_interval(treatment - control, generator(), 500) == pytest.approx(paired, abs=1e-11)


@pytest.mark.parametrize(("mean", "n_needed"), [(0.2, 2), (-0.1, 2), (0, None)])
def test_equal_differences_give_a_point_and_no_effect_size(mean, n_needed):
    control, rounding = np.array([0.1, 0.2, 0.7]), np.array([1e-14, 0, -1e-14])
    found = stats.paired_difference(control + mean + rounding, control, generator(), 100)
    assert found.bca == found.percentile == (found.mean, found.mean)
    assert found.mean == pytest.approx(mean, abs=1e-12)
    assert (found.effect_size, found.detectable, found.n_needed) == (None, 0.0, n_needed)
    assert found.p_value == (1.0 if mean == 0 else 0.25)


@pytest.mark.parametrize("d", [[0, 1], [-1, 1], [0] * 39 + [1], [1] * 39 + [-39], [1e-9, 2e-9, 4e-9]])
@pytest.mark.parametrize("resamples", [1, 2, 500])
def test_nothing_is_ever_nan(d, resamples):
    found = stats.paired_difference(d, np.zeros(len(d)), generator(), resamples)
    json.dumps(found, allow_nan=False)
    assert found.bca.low <= found.bca.high and found.percentile.low <= found.percentile.high
    assert 0 < found.p_value <= 1
    assert (found.n_needed is None) == (sum(d) == 0)


def test_hierarchical_difference_by_hand():
    # d of seed 0: (1, 3), (2, 2); of seed 1: (3, 5), (6, 6). Seed means 2 and 5: mean 3.5, sd 3 / sqrt(2).
    # Prefix means (1 + 3 + 3 + 5) / 4 = 3 and (2 + 2 + 6 + 6) / 4 = 4: p = 2 of 4 flips,
    # effect size 3.5 / sqrt(1/2), detectable 2.8015852 sqrt(1/2) / sqrt(2) = 1.4007926.
    control = np.array([[10.0, 20.0], [30.0, 40.0]])
    treatment = control + np.array([[[1, 3], [2, 2]], [[3, 5], [6, 6]]])
    found = stats.hierarchical_difference(treatment, control, generator(), 100)
    assert (found.n, found.mean, found.p_value, found.n_needed) == (2, 3.5, 0.5, 2)
    assert found.between_seed_sd == pytest.approx(3 / math.sqrt(2), abs=1e-12)
    assert found.effect_size == pytest.approx(3.5 * math.sqrt(2), abs=1e-12)
    assert found.detectable == pytest.approx(1.4007926, abs=5e-8)
    # New seeds: variance 4.5 of 2 seed means and 0.5 of 2 prefix means, t_1 = 12.7062047 for both:
    # 12.7062047 sqrt(4.5 / 2 + 0.5 / 2) = 20.0902737.
    assert found.seed_means == (2.0, 5.0)
    assert found.new_seeds == pytest.approx((3.5 - 20.0902737, 3.5 + 20.0902737), abs=5e-7)
    only = stats.hierarchical_difference(treatment, control, generator(), 1).percentile
    assert only.low == only.high


@pytest.mark.parametrize("batch", [resampling.BATCH, 8000])
def test_hierarchical_interval_equals_the_enumerated_bootstrap(batch, monkeypatch):
    d = np.array([[[0, 32], [1, 40]], [[2, 50], [4, 64]]])
    slots = list(itertools.product([0, 1], repeat=2))
    means = [
        np.mean([d[s, i, k] for s in seeds for i, ks in zip(prefixes, samples, strict=True) for k in ks])
        for prefixes in slots for seeds in slots for samples in itertools.product(slots, repeat=2)
    ]  # fmt: skip
    control = generator(2).normal(size=(2, 2))
    monkeypatch.setattr(resampling, "BATCH", batch)
    found = stats.hierarchical_difference(control + d, control, generator(), 200_001)
    assert found.percentile == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=1e-9)


def test_one_seed_and_one_sample_is_the_paired_difference():
    treatment, control = generator(7).normal(size=(2, 12))
    nested = stats.hierarchical_difference(treatment[None, :, None], control[:, None], generator(), 5000)
    paired = stats.paired_difference(treatment, control, generator(), 5000)
    assert nested.between_seed_sd is None and nested.new_seeds is None
    assert nested.seed_means == pytest.approx((nested.mean,), abs=1e-12)
    for field in ("n", "mean", "p_value", "effect_size", "detectable", "n_needed"):
        assert getattr(nested, field) == getattr(paired, field)
    json.dumps(nested, allow_nan=False)


def test_hierarchical_memory_is_bounded():
    treatment, control = np.ones((5, 512, 8)), np.zeros((512, 8))  # at once: 1000 x 20,480 numbers, 164 MB
    tracemalloc.start()
    found = stats.hierarchical_difference(treatment, control, generator(), 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.percentile == (1.0, 1.0)
    assert peak < 50e6


def test_variance_ratio_by_hand():
    # treatment - paired: (1, 3) and (0, 2), variance 1 each; - independent: (0, 4) and (2, 8), 4 and 9.
    treatment = np.array([[11.0, 23.0], [10.0, 22.0]])
    independent = np.array([[11.0, 19.0], [8.0, 14.0]])
    assert stats.variance_ratio(treatment[:1], [10, 20], independent[0], generator()).value == 4.0
    assert stats.variance_ratio(treatment[1:], [10, 20], independent[1], generator()).value == 9.0
    both = stats.variance_ratio([[11.0, 23.0], [10.0, 26.0]], [10, 20], [11, 19], generator())
    assert both.value == (2**2 + 4**2) / (1**2 + 3**2)  # (0, 4), (-1, 7) over (1, 3), (0, 6)
    assert stats.variance_ratio(treatment, [10, 20], [10, 20], generator()) == (1.0, (1.0, 1.0))
    assert stats.variance_ratio([[0.3, 0.4]], [0.1, 0.2], [0.5, 0.1], generator()) is None


def test_variance_ratio_equals_the_enumerated_bootstrap():
    # Normal differences of sd 3 and 1 over 3 prefixes, all 27 resamples; those of one prefix alone have none.
    above, below = generator(9).normal(0, [[3.0], [1.0]], (2, 3))
    drawn = [list(places) for places in itertools.product(range(3), repeat=3) if len(set(places)) > 1]
    ratios = [above[places].var() / below[places].var() for places in drawn]
    control = below - above
    found = stats.variance_ratio(below[None], np.zeros(3), control, generator(), 100_000)
    assert found.value == pytest.approx(above.var() / below.var(), rel=1e-9)
    assert found.interval == pytest.approx(np.quantile(ratios, [0.025, 0.975]), rel=1e-9)


def test_interquartile_mean_by_hand():
    assert stats.interquartile_mean([100, 2, 3, 1, 5, 4, 9, -9]) == (2 + 3 + 4 + 5) / 4
    assert stats.interquartile_mean([9, 1, 2, 3, 4, -9]) == (1 + 2 + 3 + 4) / 4  # floor(6 / 4) = 1 each
    assert stats.interquartile_mean([1, 2, 9]) == 4


def test_clopper_pearson_by_hand_and_as_published():
    # (1 - high)^20 = .025; R's manual of binom.test prints the interval of 682 in 925 (Conover 1971).
    assert stats.clopper_pearson(0, 20) == pytest.approx((0, 1 - 0.025 ** (1 / 20)), abs=1e-12)
    assert stats.clopper_pearson(682, 925) == pytest.approx((0.7076683, 0.7654066), abs=5e-8)
    for successes, n, confidence in [(1, 2, 0.95), (22, 40, 0.95), (22, 40, 0.5)]:
        low, high = stats.clopper_pearson(successes, n, confidence)
        tails = scipy_stats.binom.sf(successes - 1, n, low), scipy_stats.binom.cdf(successes, n, high)
        assert tails == pytest.approx([(1 - confidence) / 2] * 2, abs=1e-9)
        mirrored = stats.clopper_pearson(n - successes, n, confidence)
        assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_mcnemar_by_hand():
    # 5 gained and 1 lost: 2 (C(6,0) + C(6,1)) / 2^6 = 14/64; concordant pairs change nothing.
    treatment, control = [1, 1, 1, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0]
    assert stats.mcnemar_exact(treatment, control) == pytest.approx(14 / 64, abs=1e-15)
    assert stats.mcnemar_exact(np.array(control, bool), treatment) == stats.mcnemar_exact(treatment, control)
    assert stats.mcnemar_exact([1, 0, 1], [1, 0, 1]) == 1.0
    by_sum = 2 * sum(math.comb(22, k) for k in range(7)) / 2**22
    assert stats.mcnemar_exact([1] * 16 + [0] * 6, [0] * 16 + [1] * 6) == pytest.approx(by_sum, abs=1e-12)


def test_holm_by_hand_and_as_the_sequential_procedure():
    # R's p.adjust(c(.01, .04, .03, .005), "holm"): 4 x .005, 3 x .01, 2 x .03, then max(.06, .04).
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], abs=1e-15)
    assert stats.holm([0.9, 0.6]) == [1.0, 1.0] and stats.holm([0.2]) == [0.2]
    p_values = generator(8).uniform(0, 0.3, size=9) ** 2
    for alpha in np.arange(0.0005, 1, 0.001):
        rejected = set()
        for step, i in enumerate(np.argsort(p_values)):
            if p_values[i] > alpha / (9 - step):
                break
            rejected.add(i)
        assert rejected == {i for i, p in enumerate(stats.holm(p_values)) if p <= alpha}


@pytest.mark.parametrize(("counts", "kappa"), [
    ((20, 5, 10, 15), 0.4),  # observed 35/50, chance .5 x .6 + .5 x .4 = .5
    ((45, 15, 25, 15), 0.06 / 0.46),  # observed .60, chance .6 x .7 + .4 x .3 = .54
    ((25, 35, 5, 35), 0.14 / 0.54),  # observed .60, chance .6 x .3 + .4 x .7 = .46
    ((10, 0, 0, 10), 1.0), ((0, 10, 10, 0), -1.0), ((10, 0, 0, 0), 0.0), ((0, 10, 0, 0), 0.0),
])  # fmt: skip
def test_cohen_kappa_by_hand(counts, kappa):
    yes_yes, yes_no, no_yes, no_no = counts
    a = ["yes"] * (yes_yes + yes_no) + ["no"] * (no_yes + no_no)
    b = ["yes"] * yes_yes + ["no"] * yes_no + ["yes"] * no_yes + ["no"] * no_no
    assert stats.cohen_kappa(a, b) == pytest.approx(kappa, abs=1e-12)
    assert stats.cohen_kappa(b[::-1], a[::-1]) == pytest.approx(kappa, abs=1e-12)
    as_bool = [x == "no" for x in a], [x == "no" for x in b]
    assert stats.cohen_kappa(*as_bool) == pytest.approx(kappa, abs=1e-12)


def test_calibration_by_hand():
    # Bins of .1: [0, .1) has .05 (0); [.3, .4) has .3 and .34 (1, 0); [.9, 1] has .9 and 1 (1, 1).
    probabilities, labels = [1.0, 0.3, 0.05, 0.9, 0.34], [1, 1, 0, 1, 0]
    curve = stats.calibration_curve(probabilities, labels)
    assert [here.count for here in curve] == [1, 2, 2]
    assert [here.mean_probability for here in curve] == pytest.approx([0.05, 0.32, 0.95], abs=1e-15)
    assert [here.observed_rate for here in curve] == [0.0, 0.5, 1.0]
    # (1 x .05 + 2 x .18 + 2 x .05) / 5 = .102; in one bin |.6 - 2.59 / 5| = .082.
    assert stats.expected_calibration_error(probabilities, labels) == pytest.approx(0.102, abs=1e-15)
    assert stats.expected_calibration_error(probabilities, labels, 1) == pytest.approx(0.082, abs=1e-15)
    assert stats.expected_calibration_error([0.0, 1.0], [1, 0]) == 1.0


@pytest.mark.parametrize(("call", "message"), [
    (lambda: stats.paired_difference([1, 2], [1, 2, 3], generator()), r"shapes differ: \(2,\) and \(3,\)"),
    (lambda: stats.paired_difference([1, 2], [1, np.nan], generator()), "control: finite"),
    (lambda: stats.paired_difference([1, 2], [2, 3], generator(), 0), "2 values and 0 resamples"),
    (lambda: stats.hierarchical_difference(np.ones((2, 3, 4)), np.ones((3, 5)), generator()), "shapes"),
    (lambda: stats.hierarchical_difference(np.ones((2, 1, 4)), np.ones((1, 4)), generator()), "1 values"),
    (lambda: stats.variance_ratio(np.ones((2, 3)), [1, 2, 3], [1, 2], generator()), "shapes"),
    (lambda: stats.mean_interval([], generator()), "x: 1 non-empty"),
    (lambda: stats.interquartile_mean([1, float("inf")]), "x: finite"),
    (lambda: stats.clopper_pearson(4, 3), "successes 4 of n 3"),
    (lambda: stats.clopper_pearson(1, 2, 95), "confidence 95"),
    (lambda: stats.mcnemar_exact([1, 2], [0, 1]), "treatment: only 0 and 1"),
    (lambda: stats.holm([0.5, 1.1]), "0.5 to 1.1 found"),
    (lambda: stats.cohen_kappa([], []), "a: at least one label"),
    (lambda: stats.cohen_kappa([1, np.nan], [1, 2]), "a label is NaN"),
    (lambda: stats.expected_calibration_error([1.2], [1]), "0 to 1 expected"),
    (lambda: stats.calibration_curve([0.2], [1], bins=0), "bins 0"),
])  # fmt: skip
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
