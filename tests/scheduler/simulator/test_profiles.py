"""Measured tables: interpolated as Sia's simulator does, and refused when malformed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from scipy.interpolate import LinearNDInterpolator

from penstock_profiles.gpus import load_gpus
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.profiles import ModelTables, Profiles, canonical
from penstock_scheduler.simulator.workloads import BadInput
from tests.scheduler.simulator.toy import step_s, sync_s, write_profiles


def open_toy(folder: Path, gpu_type: str = "t4") -> ModelTables:
    tables = Profiles(folder).on("toy", (gpu_type,), load_gpus())
    assert tables is not None
    return tables


def test_a_placement_that_was_measured_is_linear_in_the_batch(tmp_path):
    table = open_toy(write_profiles(tmp_path)).types["t4"]
    assert table.lookup((1,), 4) == (step_s(1, 1, 4), sync_s(1))
    assert table.lookup((1,), 6) == pytest.approx((1.4, 0.05))  # halfway between 1.0 and 1.8
    assert table.lookup((3, 1), 5) == table.lookup((1, 3), 5)


def test_any_other_is_linear_in_nodes_gpus_and_batch(tmp_path):
    """(1, 2) was not measured. Between 2 and 4 GPUs on 2 nodes: 0.2 * 6 + 0.4 + 0.1 = 1.7."""
    table = open_toy(write_profiles(tmp_path)).types["t4"]
    assert table.lookup((1, 2), 6) == pytest.approx((1.7, 0.15))
    assert table.lookup((4, 2), 4) == pytest.approx((step_s(2, 6, 4), sync_s(6)))


def test_a_batch_that_does_not_fit_does_not_run(tmp_path):
    table = open_toy(write_profiles(tmp_path)).types["t4"]
    assert [table.max_atomic_batch(shape) for shape in ((1,), (2, 1), (4, 4, 4))] == [8, 8, 8]
    assert table.lookup((1,), 9) is None
    assert table.lookup((1, 2), 0) is None


@pytest.mark.parametrize(("shape", "batch"), [((4, 4, 4, 4), 8), ((1,), 2), ((4, 4, 4), 1)])
def test_beyond_the_table_our_fit_goes_on(tmp_path, shape, batch):
    """Not measured and not between: larger shapes, and smaller batches. The fit's formula is another, so only near."""
    table = open_toy(write_profiles(tmp_path)).types["t4"]
    step, sync = table.lookup(shape, batch) or (0.0, 0.0)
    assert step == pytest.approx(step_s(len(shape), sum(shape), batch), rel=0.35)
    assert 0 <= sync < step


def test_noise_is_linear_between_recorded_batches_and_constant_beyond(tmp_path):
    """Epoch 2: sqr is 1 at batch 8 and 3 at 16."""
    tables = open_toy(write_profiles(tmp_path))
    assert (tables.initial_batch, tables.max_batch) == (8, 16)
    for batch, expected in ((4, 1.0), (8, 1.0), (12, 2.0), (16, 3.0), (99, 3.0)):
        sqr_E, var_E = tables.noise(batch)
        assert sqr_E.tolist() == [1.0, expected]
        assert var_E.tolist() == [3.0, 1.0]


def test_epochs_end_after_the_fewest_iterations_of_all_batches(tmp_path):
    """10 of 10 and 11; 19 of 20 and 19; the third epoch is beyond max_epochs."""
    tables = open_toy(write_profiles(tmp_path))
    assert tables.epoch_iterations == [10, 19]
    assert tables.application.restart_s_simulated == 40
    assert tables.application.restart_s_policy == 30


def test_a_site_finds_its_type_by_another_name(tmp_path):
    folder = write_profiles(tmp_path)
    (folder / "toy/placements-t4.csv").rename(folder / "toy/placements-rtx.csv")
    assert set(open_toy(folder, "rtx2080ti").types) == {"rtx2080ti"}
    assert open_toy(folder, "a100").types == {}


def test_a_model_that_has_no_facts_has_plain_ones(tmp_path):
    folder = write_profiles(tmp_path)
    (folder / "applications.csv").unlink()
    tables = open_toy(folder)
    assert tables.epoch_iterations == [10, 19, 30]
    assert (tables.application.slowdown, tables.application.restart_s_simulated) == (1.0, 30.0)


@pytest.mark.parametrize(
    ("shape", "expected"), [((8, 2, 4), (2, 4, 8)), ((4, 0, 4), (4, 4)), ((3, 1, 2), (1, 2, 3)), ((2,), (2,))]
)
def test_the_smallest_rotation_names_a_placement(shape, expected):
    assert canonical(shape) == expected


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("toy/placements-t4.csv", "placement,local_bsz,step_time\n", "line 1: .* without sync_time"),
        ("toy/placements-t4.csv", "placement,local_bsz,step_time,sync_time\n", "found no row"),
        (
            "toy/placements-t4.csv",
            "placement,local_bsz,step_time,sync_time\n1,4,-1,0\n",
            "line 2: found step_time='-1'",
        ),
        (
            "toy/placements-t4.csv",
            "placement,local_bsz,step_time,sync_time\n1,4,1,1\n",
            "line 2: found sync_time=1 with",
        ),
        (
            "toy/placements-t4.csv",
            "placement,local_bsz,step_time,sync_time\n10,4,1,0\n",
            "line 2: found placement='10'",
        ),
        (
            "toy/placements-t4.csv",
            "placement,local_bsz,step_time,sync_time\n2,4,1,0\n",
            "as in the table of a pipeline",
        ),
        (
            "toy/scalability-t4.csv",
            "num_nodes,num_replicas,local_bsz,step_time,sync_time\n3,2,4,1,0\n",
            "num_replicas='2'",
        ),
        ("toy/validation-8.csv", "progress,grad_sqr,grad_var\n5,1,1\n4,1,1\n", "line 3: found progress='4'"),
        ("toy/validation-8.csv", "progress,grad_sqr,grad_var\n5,0,0\n", "line 2: found grad_sqr=0 and grad_var=0"),
        ("toy/validation-big.csv", "progress,grad_sqr,grad_var\n5,1,1\n", "found the batch size 'big' in its name"),
        (
            "applications.csv",
            "application,max_epochs,restart_s_simulated,restart_s_policy,slowdown\ntoy,2,40,30,0\n",
            "line 2: found slowdown='0'",
        ),
    ],
)
def test_malformed_tables(tmp_path, file, text, words):
    folder = write_profiles(tmp_path)
    (folder / file).write_text(text)
    with pytest.raises(BadInput, match=words):
        open_toy(folder)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match=r"has no model; expected MODEL/placements-TYPE\.csv"):
        Profiles(tmp_path / "away")


@pytest.mark.skipif("PENSTOCK_TEST_DATA" not in os.environ, reason="needs the public data: see docs/developer/data.md")
@pytest.mark.parametrize("model", ["bert", "cifar10", "deepspeech2", "imagenet", "yolov3"])
def test_published_tables_are_read_as_the_reference_reads_them(model):
    """Against interpolation written out anew: every measured row, and shapes that only the cloud of points covers."""
    import pandas as pd

    folder = Path(os.environ["PENSTOCK_TEST_DATA"]) / "sia/profiles"
    tables = Profiles(folder).on(model, ("t4", "rtx", "a100"), load_gpus())
    assert tables is not None
    for gpu_type, table in tables.types.items():
        rows = pd.read_csv(folder / model / f"placements-{gpu_type}.csv", dtype={"placement": str})
        for row in rows.itertuples():
            assert table.lookup([int(digit) for digit in row.placement], row.local_bsz) == (
                row.step_time,
                row.sync_time,
            )
        rows["num_nodes"] = rows.placement.str.len()
        rows["num_replicas"] = rows.placement.map(lambda digits: sum(map(int, digits)))
        xs, ys = ["num_nodes", "num_replicas", "local_bsz"], ["step_time", "sync_time"]
        larger = pd.read_csv(folder / model / f"scalability-{gpu_type}.csv")
        points = pd.concat([rows.groupby(xs)[ys].mean().reset_index(), larger[xs + ys]])
        reference = LinearNDInterpolator(points[xs].values, points[ys].values)
        measured = {canonical([int(digit) for digit in digits]) for digits in rows.placement}
        low, compared = int(rows.local_bsz.min()), 0
        for shape in ((4,) * 6, (4,) * 5, (4,) * 10, (8, 8, 8), (8, 4, 2), (3, 3, 3)):
            batch = (low + table.max_atomic_batch(shape)) // 2
            expected = reference([len(shape), sum(shape), batch])[0]
            if not np.isnan(expected).any() and canonical(shape) not in measured:
                assert table.lookup(shape, batch) == pytest.approx(tuple(expected))
                compared += 1
        assert compared or gpu_type == "a100"
