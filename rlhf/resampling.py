"""Resampling under the statistics: bootstrap intervals, sign flips, an explicit generator, bounded memory."""

import warnings
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
BATCH = 2**20  # numbers drawn at once: what bounds the memory of every resampling


class Interval(NamedTuple):
    """A two-sided confidence interval, in the unit of the measure."""

    low: float
    high: float


def bootstrap_intervals(
    values: np.ndarray, rng: np.random.Generator, resamples: int
) -> tuple[Interval, Interval]:
    """95% BCa and percentile intervals of the mean of values [n], n >= 2, from the same resamples.

    BCa falls back on the percentiles where scipy's is NaN. Sources: Efron (1987); scipy.stats.bootstrap.
    """
    enough(values.size, resamples)
    options = {"method": "BCa", "n_resamples": resamples, "batch": _batch(values.size), "rng": rng}
    with warnings.catch_warnings(action="ignore"):
        found = stats.bootstrap((values,), np.mean, confidence_level=CONFIDENCE, **options)
    percentile = percentiles(found.bootstrap_distribution)
    bca = Interval(float(found.confidence_interval.low), float(found.confidence_interval.high))
    return (bca if np.isfinite(bca).all() else percentile), percentile


def sign_flip_p(differences: np.ndarray, rng: np.random.Generator, resamples: int) -> float:
    """Two-sided permutation p-value of "differences [n] are symmetric about 0", on |mean|.

    All 2^n flips where 2^n <= resamples, else m = resamples random ones and (k + 1) / (m + 1).
    """
    options = {"permutation_type": "samples", "alternative": "greater", "vectorized": True, "rng": rng}
    options |= {"n_resamples": resamples, "batch": _batch(differences.size)}
    found = stats.permutation_test((differences,), lambda d, axis: np.abs(d.mean(axis)), **options)
    return float(found.pvalue)


def nested_means(differences: np.ndarray, rng: np.random.Generator, resamples: int) -> np.ndarray:
    """Means [resamples] of differences [seeds, n, samples], n >= 2.

    Every resample draws prefixes, seeds (the same for every prefix: the two are crossed), and samples within
    each drawn prefix (the same for every seed: they meet the same control).
    """
    seeds, n, samples = differences.shape
    enough(n, resamples)
    means = []
    for size in _batches(resamples, differences.size):
        prefix = rng.integers(n, size=(size, n, 1))
        sample = rng.integers(samples, size=(size, n, samples))
        seed = rng.integers(seeds, size=(seeds, size))
        of_each_seed = differences[:, prefix, sample].mean((2, 3))
        means.append(np.take_along_axis(of_each_seed, seed, axis=0).mean(0))
    return np.concatenate(means)


def variance_ratios(
    numerator: np.ndarray, denominator: np.ndarray, rng: np.random.Generator, resamples: int
) -> np.ndarray:
    """Ratios [resamples] of two variances over n >= 2 prefixes, both [seeds, n], pooled over seeds.

    A resample draws prefixes, the same for both and for every seed; ratios without a denominator are NaN.
    """
    seeds, n = numerator.shape
    enough(n, resamples)
    ratios = []
    for size in _batches(resamples, 2 * seeds * n):
        prefix = rng.integers(n, size=(size, n))
        above, below = (x[:, prefix].var(2, ddof=1).mean(0) for x in (numerator, denominator))
        ratios.append(np.divide(above, below, out=np.full(size, np.nan), where=below > 0))
    return np.concatenate(ratios)


def percentiles(draws: np.ndarray) -> Interval:
    """The 95% percentile interval of draws [resamples]."""
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


def enough(n: int, resamples: int) -> None:
    """Raise `ValueError` below two values or one resample."""
    if n < 2 or resamples < 1:
        raise ValueError(f"{n} values and {resamples} resamples: at least 2 and 1 expected")


def _batch(size: int) -> int:
    return max(1, BATCH // size)


def _batches(resamples: int, size: int) -> list[int]:
    batch = _batch(size)
    return [min(batch, resamples - start) for start in range(0, resamples, batch)]
