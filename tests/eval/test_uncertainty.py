import numpy as np
import pytest

from kvzip_press.eval.report.uncertainty import mean_and_error, paired_difference


def test_mean_and_standard_error_by_hand():
    mean, error = mean_and_error([0.0, 1.0, 1.0])
    assert mean == pytest.approx(2 / 3)
    assert error == pytest.approx((1 / 3) ** 0.5 / 3**0.5)
    assert mean_and_error([0.5]) == (0.5, None)


def test_paired_difference_is_about_the_same_contexts():
    """Contexts differ far more among themselves than a press from the full cache on any of them."""
    rng = np.random.default_rng(1)
    full = rng.random(40)
    values = full - 0.1 + rng.normal(0, 0.001, 40)
    mean, low, high = paired_difference(values, full)
    assert low < mean < high < -0.09
    assert high - low < 0.002


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        _, low, high = paired_difference(rng.normal(0.2, 1, 60), np.zeros(60), level=0.8, resamples=400)
        covered += low <= 0.2 <= high
    assert 0.72 < covered / 300 < 0.87


def test_intervals_are_those_of_the_bootstrap_in_few_words():
    values, bases = [0.2, 0.9, 0.4, 0.4, 0.8], [0.3, 1.0, 0.4, 0.8, 0.6]
    mean, low, high = paired_difference(values, bases, resamples=20_000)
    differences = np.array(values) - np.array(bases)
    # All 5^5 resamples, equally likely
    every = np.stack(np.meshgrid(*[differences] * 5)).reshape(5, -1).mean(axis=0)
    assert mean == pytest.approx(differences.mean())
    assert low == pytest.approx(np.quantile(every, 0.025), abs=0.011)
    assert high == pytest.approx(np.quantile(every, 0.975), abs=0.011)


def test_intervals_are_seeded_and_independent_of_the_size_of_the_blocks(monkeypatch):
    values, bases = np.linspace(0, 1, 50), np.zeros(50)
    first = paired_difference(values, bases, resamples=1000)
    assert paired_difference(values, bases, resamples=1000) == first
    monkeypatch.setattr("kvzip_press.eval.report.uncertainty._BLOCK", 50 * 7)
    assert paired_difference(values, bases, resamples=1000) == pytest.approx(first, abs=1e-12)
    assert paired_difference(values, bases, resamples=1000, seed=1) != first


def test_one_context_has_an_interval_of_no_width():
    assert paired_difference([0.5], [1.0]) == (-0.5, -0.5, -0.5)


def test_unpaired_scores_are_refused():
    with pytest.raises(ValueError, match="got 2 and 1"):
        paired_difference([1, 2], [1])
    with pytest.raises(ValueError, match="got 0 and 0"):
        paired_difference([], [])
    with pytest.raises(ValueError, match=r"level must be in \(0, 1\), got 95"):
        paired_difference([1], [1], level=95)
