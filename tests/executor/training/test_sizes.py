"""The job's choice of its batch."""

from penstock_executor.training.batches import BatchSize
from penstock_executor.training.sizes import BatchChooser
from penstock_profiles.wire import Observation


def chooser(fixed: bool = False, replicas: int = 2, **options) -> BatchChooser:
    return BatchChooser(64, 64 if fixed else 1024, fixed=fixed, gpu_type="t4", nodes=1, replicas=replicas, **options)


def seen(atomic: int, *, gpus: int = 2, noise: float | None = 1e4, memory_mb: float | None = None) -> Observation:
    """A step of 0.1 s, plus 1 ms per sample, plus 0.05 s of synchronisation."""
    return Observation(
        gpu_type="t4",
        nodes=1,
        gpus=gpus,
        atomic_batch=atomic,
        steps=100,
        step_time_s=0.15 + 0.001 * atomic,
        sync_time_s=0.05,
        grad_sqr=None if noise is None else 1.0,
        grad_var=noise,
        memory_mb=memory_mb,
        progress=0.0,
    )


def test_it_begins_with_the_script_s_batch_and_grows_twofold():
    job = chooser()
    assert job.choose() == BatchSize(64, 32)
    sizes = []
    for _ in range(6):
        job.observe(seen(job.choose().atomic))
        sizes.append(job.choose().atomic)
    assert sizes[:3] == [64, 128, 256]
    assert max(sizes) <= 512


def test_without_noise_it_stays():
    job = chooser()
    job.observe(seen(32, noise=None))
    assert job.choose() == BatchSize(64, 32)


def test_a_fixed_batch_stays_and_is_shared_by_those_there_are():
    job = chooser(fixed=True, replicas=3)
    job.observe(seen(22, gpus=3))
    assert job.choose() == BatchSize(64, 22)


def test_what_did_not_fit_is_not_tried_again_here_or_after_a_restart():
    job = chooser()
    for atomic in (32, 64, 128):
        job.observe(seen(atomic))
    job.out_of_memory("t4", 128)
    assert job.choose().atomic <= 96
    again = chooser()
    again.load_state_dict(job.state_dict())
    assert again.choose() == job.choose()
    small = chooser(fixed=True)
    small.out_of_memory("t4", 32)
    assert small.choose() == BatchSize(64, 24), "the same total batch, in more micro-steps"
    small.out_of_memory("t4", 1)
    assert small.choose().atomic == 1


def test_a_checkpoint_does_not_raise_a_limit_that_memory_has_lowered_since():
    """Else the run restarts from the same checkpoint with the same batch, which does not fit, for ever."""
    before = chooser()
    before.out_of_memory("t4", 58)
    saved = before.state_dict()
    after = chooser()
    after.out_of_memory("t4", 43)
    after.load_state_dict(saved)
    assert (before.limit_of("t4"), after.limit_of("t4")) == (43, 32)


def test_nearly_full_memory_is_not_outgrown():
    """6,000 of 8,000 MiB in use: 0.9 x 8,000 / 6,000 = 1.2 times 32 samples are 38."""
    job = chooser(memory_mb=8000.0)
    job.observe(seen(32, memory_mb=6000.0))
    assert job.choose().atomic <= 38


def test_a_limit_of_one_gpu_type_does_not_apply_to_another():
    job = chooser()
    job.out_of_memory("rtx", 4)
    assert job.limit_of("rtx") == 3
    assert job.choose() == BatchSize(64, 32)


def test_another_batch_is_chosen_only_for_a_gain_of_5_percent():
    """Without growth limits, it would take each batch that is a little better: 349, 414, 438, 491 samples, and so on."""
    job = chooser()
    for atomic in (32, 64, 128, 256, 512):
        job.observe(seen(atomic, noise=300.0))
    best = job.choose()
    near = BatchSize(best.total * 9 // 10, -(-best.total * 9 // 20))
    assert job.choose(near) == near
    assert job.choose(best) == best
    assert job.choose(BatchSize(64, 32)) == best
    job.out_of_memory("t4", near.atomic)
    assert job.choose(near).atomic < near.atomic, "what does not fit is left in any case"
