"""What a user can do with stored profiles (`PUT /v1/profiles`), found on a real site: fill the store, and claim any number."""

from __future__ import annotations

import httpx
import pytest

from penstock_profiles.profiles import Profile
from penstock_profiles.wire import Observation
from penstock_scheduler.api.client import ApiError
from penstock_scheduler.store.jobs import MOST_PROFILES
from tests.scheduler.service.api import Api, serving

SEEN = Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=8, steps=1, step_time_s=1.0, progress=0)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("profiles")) as started:
        yield started


def profile(gpu_type: str, ended: str = "", seen: Observation = SEEN) -> Profile:
    return Profile(job="train", gpu_type=gpu_type, measured_s=1.0, versions={}, ended=ended, observations=(seen,))


def test_one_user_cannot_fill_the_store_with_profiles(api: Api) -> None:
    """293 profiles took 557 MB of the store in 25 s, and penstockd 0.9 GB of memory to list them."""
    long = "x" * 1_000_000
    ada, bob = api.client("ada"), api.client("bob")
    answers = []
    for number in range(2 * MOST_PROFILES // len(long)):
        try:
            ada.store_profile(profile(f"g{number}", long))
            answers.append(204)
        except ApiError as error:
            answers.append(error.status)
    assert answers.count(204) == MOST_PROFILES // len(long)
    assert set(answers[answers.count(204) :]) == {413}
    bob.store_profile(profile("t4"))
    assert len(bob.profiles().profiles) == 1, "another user's room is not used up"
    ada.store_profile(profile("g0", "short"))
    ada.store_profile(profile("g-new", "short"))  # one in place of a longer one made room


@pytest.mark.parametrize(
    "claimed",
    [
        {"atomic_batch": 10**400},
        {"gpus": 10**30, "nodes": 10**30},
        {"step_time_s": 1e-320},
        {"step_time_s": 1e308},
        {"grad_sqr": 1e308, "grad_var": 1e308},
    ],
    ids=str,
)
def test_a_stored_profile_has_the_bounds_of_a_report(api: Api, claimed: dict[str, float]) -> None:
    body = profile("t4").model_dump(mode="json")
    body["observations"][0] |= claimed
    answer = httpx.put(f"{api.url}/v1/profiles", json=body, headers={"Authorization": f"Bearer {api.tokens['ada']}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad-body"), answer.text
    assert "must be at" in answer.text
