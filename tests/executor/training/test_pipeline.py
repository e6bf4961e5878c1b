"""Hybrid parallelism with real processes: pipelines of two stages, and replicas of them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor import Checkpoints
from penstock_executor.training.batches import epoch_order
from penstock_profiles.noise import NoiseEstimator

from ..elastic import environment, gang, steps, surviving, torch
from ..spool import ROOT, bodies, tell, wait_for

BATCH, SIZE, EPOCHS, MAX_NORM = 32, 203, 3, 0.5
STEPS = SIZE // BATCH


def train(folder: Path, *options: str, processes: int, spool: Path | None = None):
    script = ROOT / "tests" / "executor" / "train_pipeline.py"
    return gang(script, folder, *options, processes=processes, environ=environment(spool))


def trained_in_one_piece() -> tuple[dict, tuple[float, float]]:
    """The same training as a plain loop: the weights, and the noise by two halves of each step's batch."""
    sys.path.insert(0, str(ROOT / "tests" / "executor"))
    try:
        from train_elastic import Moons
        from train_pipeline import layers, loss_of
    finally:
        sys.path.pop(0)
    data, model, noise = Moons(SIZE), layers(), NoiseEstimator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(epoch_order(SIZE, epoch, 0))
        for step in range(STEPS):
            halves = []
            for half in order[step * BATCH : (step + 1) * BATCH].view(2, -1):
                model.zero_grad()
                loss_of(model(data.points[half].double()), data.labels[half].double()).backward()
                halves.append([parameter.grad.clone() for parameter in model.parameters()])
            if (epoch, step) != (EPOCHS - 1, STEPS - 1):  # a step's norms are reported after the next step
                noise.feed([torch.cat([each.reshape(-1) for each in half]).numpy() for half in halves], 1.0)
            for parameter, one, other in zip(model.parameters(), *halves, strict=True):
                parameter.grad = (one + other) / 2
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    return dict(model.state_dict()), (noise.noise.grad_sqr, noise.noise.grad_var)


def test_two_replicas_of_two_stages_learn_what_one_process_learns_and_go_on_as_one(tmp_path: Path):
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    options = (f"--max-norm={MAX_NORM}",)
    with train(tmp_path, "--sleep=0.1", "--hold=8", *options, processes=4, spool=spool) as job:
        measured = wait_for(
            lambda: [body for body in bodies(spool, 1, "observation") if body.sync_time_s is not None], "report"
        )
        wait_for(lambda: "held in step 8" in job.said.read_text(), "steps")
        job.processes[1].terminate()  # all stop, whichever process gets the signal
        assert job.wait() == 143
    seen = measured[0]
    assert (seen.gpus, seen.gpus_per_replica, seen.replicas) == (4, 2, 2)
    assert (seen.atomic_batch, seen.accumulation_steps, seen.samples) == (16, 0, 32)
    assert 0 < seen.sync_time_s < seen.step_time_s
    found = Checkpoints(tmp_path / "checkpoints", 1).latest()
    assert set(found.shards.files) == {"part-0.pt", "part-1.pt"}
    assert found.step == 10  # the step in which it was held, and the one after which all know
    (found.shards.folder / "part-1.pt").write_bytes(b"harmed")  # the one of the epoch's end counts
    with train(tmp_path, *options, processes=2, spool=spool) as job:
        job.finish()
    assert f"part-1.pt in {found.shards.folder.name} is truncated or altered" in (tmp_path / "log").read_text()
    records = surviving(tmp_path)
    assert min(record["step"] for record in records if record["run"] == 2) == (found.step - 1) // STEPS * STEPS
    assert {record["world"] for record in records} == {4, 2}
    for epoch in range(EPOCHS):
        samples = [sample for record in records if record["epoch"] == epoch for sample in record["seen"]]
        assert sorted(samples) == sorted(epoch_order(SIZE, epoch, 0)[: STEPS * BATCH].tolist())
    weights, _ = trained_in_one_piece()
    ours = [torch.load(tmp_path / f"final-{place}.pt") for place in range(2)]
    assert [each["places"] for each in ours] == [[0, 0], [1, 1]], "each process has its own state again"
    together = {name: value for each in ours for name, value in renamed(each["weights"], each is ours[1]).items()}
    assert together.keys() == weights.keys()
    assert max(float((together[name] - weights[name]).abs().max()) for name in weights) < 1e-9


def renamed(part: dict, second: bool) -> dict:
    """The second stage's layer 0 is the model's layer 2."""
    return {name.replace("0.", "2.", 1) if second else name: value for name, value in part.items()}


@pytest.mark.long
def test_gradient_noise_is_that_of_whole_replicas_and_the_batch_grows_with_them(tmp_path: Path):
    """The sum over stages and replicas equals the result of one process with the two halves of each batch."""
    with train(tmp_path, f"--max-norm={MAX_NORM}", processes=4) as job:
        job.finish()
    _, noise = trained_in_one_piece()
    assert torch.load(tmp_path / "final-0.pt")["noise"] == pytest.approx(noise, rel=1e-6)
    with train(tmp_path / "grown", "--max-batch=64", processes=4) as job:
        job.finish()
    assert {record["batch"] for record in steps(tmp_path / "grown")} == {64}


def test_a_stage_with_nothing_to_train_is_refused_by_all(tmp_path: Path):
    with train(tmp_path, "--frozen", processes=2) as job:
        assert job.wait() == 1
    assert (tmp_path / "log").read_text().count("the part of process 1 has no parameter to train") == 2
