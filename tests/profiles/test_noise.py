import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.noise import GradientNoise, Moments, NoiseEstimator, adam_preconditioner, moments
from penstock_profiles.throughput import efficiency

# |g_i|^2 = 10 and 2, mean 6; g_bar = (2, 1), |g_bar|^2 = 5. So |mu|^2 = 2 x 5 - 6 = 4 and tr C_m = 2 (6 - 5) = 2.
TWO = [[3.0, 1.0], [1.0, 1.0]]
# g_bar = 0 and |g_i|^2 = 1: |mu|^2 = 0 - 1 = -1 and tr C_m = 2.
OPPOSITE = [[1.0, 0.0], [-1.0, 0.0]]

scales = st.floats(0.01, 1e4)
numbers = st.floats(-1e6, 1e6)


@st.composite
def gradients(draw, parameters=3, least=1):
    rows = draw(st.integers(least, 4))
    return np.array(draw(st.lists(numbers, min_size=rows * parameters, max_size=rows * parameters))).reshape(rows, -1)


def estimate(*steps, preconditioner=1.0):
    estimator = NoiseEstimator()
    for gradients_NP, scale in steps:
        estimator.feed(gradients_NP, scale, preconditioner)
    return estimator.noise


def approx(grad_sqr, grad_var, rel=1e-9):
    return pytest.approx((grad_sqr, grad_var), rel=rel)


def pair(noise):
    return noise.grad_sqr, noise.grad_var


def test_two_replicas():
    """S = 2: each over m = M0 samples, so var = tr C_m = 2, which S (6 - 5) / (2 - 1) = 2 also says."""
    assert moments(TWO) == Moments(local_sqr=6.0, mean_sqr=5.0, count=2)
    assert pair(estimate((TWO, 2))) == approx(4, 2)


def test_half_the_batch_each():
    """S = 1: each over m = M0 / 2, whose variance is twice that at M0: var = 2 / 2 = 1."""
    assert pair(estimate((TWO, 1))) == approx(4, 1)


def test_one_replica_pairs_steps():
    """Two steps of S = 2, each over m = 2 M0, whose variance is half of that at M0: var = 2 x 2 = 4."""
    assert estimate((TWO[:1], 2)) is None
    assert pair(estimate((TWO[:1], 2), (TWO[1:], 2))) == approx(4, 4)


def test_preconditioner_multiplies_the_gradients():
    """By (1, 2): (3, 2) and (1, 2), norms 13 and 5, mean 9; g_bar = (2, 2), 8. sqr = 16 - 9 = 7, var = 9 - 8 = 1 =
    S."""
    assert pair(estimate((TWO, 1), preconditioner=[1.0, 2.0])) == approx(7, 1)


def test_adam_preconditioner():
    """beta2 = 0.75, step 1: v_hat = v / 0.25 = (4, 16), roots (2, 4), plus eps 1: 1/3 and 1/5."""
    assert adam_preconditioner([1.0, 4.0], step=1, beta2=0.75, eps=1.0) == pytest.approx([1 / 3, 1 / 5])


def test_first_step_counts_whole_and_later_ones_by_their_samples():
    """Weights 0.999^2 x (1 - 0.999) and 1 - 0.999^2 of the steps with S = 1 and 2, over 1 - 0.999^3."""
    old, new, all_ = 0.999**2 * 0.001, 1 - 0.999**2, 1 - 0.999**3
    doubled = 2 * np.array(TWO)
    assert pair(estimate((TWO, 1))) == approx(4, 1)
    assert pair(estimate((TWO, 1), (doubled, 2))) == approx((old * 4 + new * 16) / all_, (old * 1 + new * 8) / all_)


def test_negative_steps_are_averaged_and_only_a_negative_average_is_0():
    """-1, then 4: (0.999 x -1 + 4) / 1.999. Taken as 0, the first would leave 4 / 1.999."""
    assert pair(estimate((OPPOSITE, 1))) == approx(0, 1)
    assert estimate((OPPOSITE, 1), (TWO, 1)).grad_sqr == pytest.approx((4 - 0.999) / 1.999)


def test_equal_gradients_have_no_variance_and_zeros_give_no_estimate():
    assert pair(estimate(([[1.0, 2.0]] * 3, 3))) == (5, 0)
    assert estimate((np.zeros((2, 3)), 1)) is None
    assert NoiseEstimator().noise is None


def test_replicas_drop_the_estimate_of_pairs_but_not_the_reverse():
    assert pair(estimate((TWO[:1], 1), (TWO[1:], 1), (OPPOSITE, 1))) == approx(0, 1)
    # (OPPOSITE, then a pair of |mu|^2 = 4 and var = 2)
    mixed = estimate((OPPOSITE, 1), (TWO[:1], 1), (TWO[1:], 1))
    assert pair(mixed) == approx((4 - 0.999) / 1.999, (2 + 0.999) / 1.999)


def test_a_mean_that_rounding_made_too_long_has_no_variance():
    estimator = NoiseEstimator()
    estimator.update(Moments(local_sqr=1.0, mean_sqr=1.005, count=2), 1)
    assert pair(estimator.noise) == approx(1.005, 0)


def test_the_library_may_reuse_its_gradient_buffer():
    buffer_NP, estimator = np.array(TWO[:1]), NoiseEstimator()
    estimator.feed(buffer_NP, 2)
    buffer_NP[:] = TWO[1:]
    estimator.feed(buffer_NP, 2)
    assert pair(estimator.noise) == approx(4, 4)


def test_a_step_of_many_breaks_the_chain_of_pairs():
    estimator = NoiseEstimator()
    for gradients_NP in (TWO[:1], TWO, TWO[1:]):
        estimator.feed(gradients_NP, 1)
    assert estimator.weight == pytest.approx(0.001)


MU_P = np.linspace(-1, 1, 40)  # |mu|^2 = 14.0
DEVIATION_P = np.linspace(1, 15, 40)  # of one sample's gradient; tr C_1 = 3,247, so tr C_M0 = 101.5
INITIAL_BATCH = 32


@pytest.mark.parametrize(
    ("replicas", "micro_steps", "atomic_batch"),
    [(2, 1, 16), (1, 2, 16), (4, 1, 32), (2, 3, 64), (1, 1, 32), (1, 1, 128), (3, 1, 8)],
)
@pytest.mark.parametrize("adam", [False, True])
def test_estimates_converge_to_the_truth_at_the_initial_batch(replicas, micro_steps, atomic_batch, adam):
    """At any n, m and S, the same two numbers. 6,000 steps; the tolerances are at least four standard errors."""
    random = np.random.default_rng(7)
    count = replicas * micro_steps
    preconditioner_P = adam_preconditioner(MU_P**2 + DEVIATION_P, step=10_000) if adam else np.ones_like(MU_P)
    estimator = NoiseEstimator()
    scale = count * atomic_batch / INITIAL_BATCH
    for _ in range(6000):
        noise_NP = random.standard_normal((count, len(MU_P))) * DEVIATION_P / math.sqrt(atomic_batch)
        estimator.feed(MU_P + noise_NP, scale, preconditioner_P)
    assert estimator.noise.grad_sqr == pytest.approx(np.sum((preconditioner_P * MU_P) ** 2), rel=0.25)
    truth = np.sum((preconditioner_P * DEVIATION_P) ** 2) / INITIAL_BATCH
    assert estimator.noise.grad_var == pytest.approx(truth, rel=0.05)


@given(st.lists(st.tuples(gradients(), scales), max_size=8))
def test_the_noise_is_always_one_that_the_models_accept(steps):
    noise = estimate(*steps)
    if noise is not None:
        assert 0 < efficiency(noise.grad_sqr, noise.grad_var, 640, 10) <= 1


@given(gradients(least=2), scales, st.floats(0.01, 100))
def test_the_unit_of_the_gradient_does_not_matter(gradients_NP, scale, unit):
    plain, scaled = estimate((gradients_NP, scale)), estimate((gradients_NP * unit, scale))
    size = np.sum(gradients_NP**2)
    if size > 1e-6:  # smaller squares lose digits
        assert pair(scaled) == pytest.approx(
            tuple(unit**2 * np.array(pair(plain))), abs=1e-9 * unit**2 * size * (1 + scale)
        )


@given(gradients(parameters=5, least=2), st.integers(1, 4), st.booleans())
def test_moments_of_the_parts_add_up(gradients_NP, cut, consecutive):
    whole, left, right = (
        moments(part_NP, consecutive=consecutive)
        for part_NP in (gradients_NP, gradients_NP[:, :cut], gradients_NP[:, cut:])
    )
    parts = left + right
    assert (parts.local_sqr, parts.mean_sqr) == pytest.approx((whole.local_sqr, whole.mean_sqr))
    assert (parts.count, parts.consecutive) == (whole.count, whole.consecutive)


@given(st.lists(st.tuples(gradients(least=2), scales), max_size=4), st.lists(st.tuples(gradients(least=2), scales)))
def test_a_restored_estimator_goes_on_as_the_saved_one(before, after):
    saved, restored = NoiseEstimator(), NoiseEstimator()
    for step in before:
        saved.feed(*step)
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for step in after:
        saved.feed(*step)
        restored.feed(*step)
    assert restored.state_dict() == saved.state_dict()
    assert restored.noise == saved.noise


def test_a_restored_estimator_knows_that_pairs_were_in_it():
    saved, restored = NoiseEstimator(), NoiseEstimator()
    saved.feed(TWO[:1], 1)
    saved.feed(TWO[1:], 1)
    restored.load_state_dict(saved.state_dict())
    restored.feed(OPPOSITE, 1)
    assert pair(restored.noise) == approx(0, 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: moments([[math.nan], [1.0]]), "gradients_NP contains a NaN.*leave out"),
        (lambda: moments([1.0, 2.0]), r"gradients_NP has shape \(2,\).*one flat row per replica"),
        (lambda: moments(np.zeros((0, 3))), r"gradients_NP has shape \(0, 3\)"),
        (lambda: moments([[1.0]]), "count=1 .*pair it"),
        (lambda: moments(TWO, [1.0, -1.0]), "preconditioner_P must contain only positive.*1 for SGD"),
        (lambda: Moments(1.0, 1.0, 0), "count=0 "),
        (lambda: Moments(-1.0, 1.0, 2), "local_sqr=-1.0 .*leave out"),
        (lambda: Moments(1.0, math.nan, 2), "mean_sqr=nan .*leave out"),
        (lambda: Moments(1.0, 2.0, 2), "mean_sqr=2.0 is above local_sqr=1.0.*divide summed"),
        (lambda: moments(TWO) + moments([*TWO, [0.0, 0.0]]), "belong to different gradients.*one step"),
        (lambda: moments(TWO) + moments(TWO, consecutive=True), "belong to different gradients"),
        (lambda: estimate((TWO, 0)), "scale=0 .*total batch / the initial"),
        (lambda: estimate((TWO, math.nan)), "scale=nan"),
        (
            lambda: NoiseEstimator().update(Moments(1e308, 0.0, 2), 10.0),
            "overflows; divide the gradients by the loss scale",
        ),
        (lambda: estimate(([[1.0]], 1), ([[1.0, 2.0]], 1)), "2 parameters, but the step before had 1; use a new"),
        (
            lambda: NoiseEstimator().load_state_dict({"sqr": 1.0}),
            r"keys \['sqr'\]; it must have exactly the keys \['paired', 'sqr'",
        ),
        (lambda: load(weight=1.5), r"weight=1.5 is not in \[0, 1\]; leave the state out"),
        (lambda: load(var=-1.0), "var=-1.0"),
        (lambda: load(sqr=math.inf), "sqr=inf"),
        (lambda: adam_preconditioner([-1.0], 1), "exp_avg_sq_P contains a negative"),
        (lambda: adam_preconditioner([1.0], 0), "step=0 is below 1.*begin after"),
        (lambda: adam_preconditioner([1.0], 1, beta2=1.0), r"beta2=1.0 is not in \[0, 1\)"),
        (lambda: adam_preconditioner([1.0], 1, eps=-1.0), "eps=-1.0"),
        (lambda: adam_preconditioner([0.0], 1, eps=0.0), "eps=0 with a 0.*use Adam's eps"),
        (lambda: GradientNoise(-1.0, 1.0), "grad_sqr=-1.0"),
        (lambda: GradientNoise(0.0, 0.0), "no gradient"),
    ],
)
def test_wrong_input_is_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def load(**changes):
    NoiseEstimator().load_state_dict({"sqr": 1.0, "var": 1.0, "weight": 0.5, "paired": False} | changes)


def test_a_refused_step_leaves_the_estimate_alone():
    estimator = NoiseEstimator()
    estimator.feed(TWO, 1)
    before = estimator.state_dict()
    with pytest.raises(ValueError, match="gradients_NP"):
        estimator.feed([[math.inf, 1.0], [1.0, 1.0]], 1)
    assert estimator.state_dict() == before
