"""`penstock models`, on a store with jobs that have ended."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from penstock_profiles.families import Families
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.models import SpecModels
from tests.scheduler.builders import job
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import serving


def observation(gpus: int) -> Observation:
    """Steps of 0.1 s and 0.02 s of synchronisation, with 16 samples for each GPU: 160 samples/s on one."""
    sync_s = 0.02 if gpus > 1 else 0.0
    return Observation(
        gpu_type="t4", nodes=1, gpus=gpus, atomic_batch=16, steps=100, step_time_s=0.1 + sync_s, sync_time_s=sync_s,
        grad_sqr=1.0, grad_var=1e6, progress=1e6,
    )  # fmt: skip


@pytest.fixture
def api(tmp_path):
    """ada's train-7 and train-8 have ended on up to 4 T4s; bob's job has ended without a report."""
    spec = job("7", batch_size=16, max_batch_size=256).spec
    with serving(tmp_path) as api:
        store = api.board.store
        for number, gpus in ((7, 1), (8, 4)):
            view = {"name": f"train-{number}", "user": "ada", "state": "ended", "ended": "COMPLETED"}
            times = {"submit_s": 0.0, "end_s": time.time() - 60}
            store.save_jobs([JobView(id=str(number), version=1, spec=spec, total=2e6, **view, **times)])
            bodies = [observation(each) for each in (1, gpus)]
            store.add_reports(
                [Report(job_id=str(number), epoch=1, sequence=n, time_s=1.0, body=b) for n, b in enumerate(bodies)]
            )
            model = SpecModels(Families(), 30.0).beginning(spec, bodies[0])
            model.observe_report(bodies[0])
            store.add_model(str(number), 1.0, model.estimator)
        store.save_jobs(
            [JobView(id="9", version=1, name="x", user="bob", state="ended", submit_s=0.0, end_s=1.0, spec=spec)]
        )
        yield api


def test_an_operator_sees_what_ended_jobs_have_taught(api):
    listed = penstock(api, "models", "list", who="oz")
    assert listed.exit_code == 0, listed.output
    assert "ada/train-#@16-256 ada 2" in " ".join(listed.output.split())
    assert "bob" not in listed.output, "a job that reported nothing teaches nothing"
    assert "recall_models is false" in listed.output
    shown = " ".join(penstock(api, "models", "show", "ada/train-#@16-256", who="oz").output.split())
    assert "the newest 2 jobs" in shown
    assert "t4 1 16 160 samples/s" in shown
    assert "t4 4 " in shown
    assert "Length of the 2 that completed: 2,000,000 samples in the median" in shown
    found = json.loads(penstock(api, "models", "show", "ada/train-#@16-256", "--json", who="oz").stdout)
    assert found["taught"]["most_gpus"] == 4
    assert json.loads(penstock(api, "models", "list", "--json", who="oz").stdout)["kinds"][0]["taught"] is None
    assert "penstock models list" in str(penstock(api, "models", "show", "ada/nosuch", who="oz").exception)
    for words in ("list", "show ada/train-#@16-256", "export"):
        assert "needs the role operator" in str(penstock(api, "models", *words.split(), who="ada").exception)


def test_an_admin_forgets_a_kind_and_the_audit_log_tells(api):
    kind = "ada/train-#@16-256"
    assert penstock(api, "models", "forget", kind, who="oz").exit_code != 0
    assert kind in penstock(api, "models", "list").output
    assert f"{kind} is forgotten" in penstock(api, "models", "forget", kind).output
    assert "No ended job has taught anything" in penstock(api, "models", "list").output
    assert "no ended job is of the kind" in str(penstock(api, "models", "forget", kind).exception)
    assert api.board.store.job("7") is not None, "the jobs' history stays"
    assert len(api.board.store.observations("8", 10)) == 2
    lines = [(each.user, each.allowed, each.text) for each in api.board.store.audit() if "models" in each.action]
    assert [each[1:] for each in lines] == [(True, kind), (False, "")]


def test_kinds_go_from_one_site_to_another(api, tmp_path):
    exported = penstock(api, "models", "export", who="oz")
    assert exported.exit_code == 0, exported.output
    assert "ada" not in exported.stdout, "users stay at home"
    file = tmp_path / "kinds.json"
    file.write_text(exported.stdout)
    with serving(tmp_path / "other") as other:
        assert "nothing to export" in str(penstock(other, "models", "export").exception)
        assert penstock(other, "models", "import", str(file), who="oz").exit_code != 0
        assert "/train-#@16-256" in penstock(other, "models", "import", str(file)).output
        assert "/train-#@16-256 all" in " ".join(penstock(other, "models", "list").output.split())
        assert "for the jobs of all users" in penstock(other, "models", "show", "/train-#@16-256").output
        new = job("1", user="zoe", batch_size=16, max_batch_size=256)
        new = type(new)("1", "train-3", "zoe", new.spec, new.partitions, new.phase, 0.0)
        kin = KinOfJobs(other.board.store, SpecModels(Families(), 30.0).beginning).of([new])["1"]
        assert kin is not None
        assert float(kin.estimator.goodput("t4", np.array([1]), np.array([1]))[0]) == pytest.approx(160, rel=0.01)
        assert "is forgotten" in penstock(other, "models", "forget", "/train-#@16-256").output
    file.write_text("[]")
    assert "kinds.json" in str(penstock(api, "models", "import", str(file)).exception)
