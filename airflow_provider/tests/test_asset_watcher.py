"""An asset watcher for jobs that end."""

import asyncio
import json
import time

from airflow_provider_penstock.triggers.penstock import PenstockJobEventTrigger


def test_an_asset_watcher_hears_of_the_jobs_that_it_is_for(folder, instance, hook):
    async def watch():
        trigger = PenstockJobEventTrigger("watched-*", poll_interval_s=0.3)
        again = PenstockJobEventTrigger(**trigger.serialize()[1])
        event = asyncio.ensure_future(anext(again.run()))
        await asyncio.sleep(1)
        ids = []
        for name, script in (("other", "exit 0"), ("watched-bad", "exit 1"), ("watched-good", "exit 0")):
            order = {"key": f"watcher:{time.time()}", "name": name, "script": f"#!/bin/bash\n{script}\n"}
            ids.append((await asyncio.to_thread(hook.submit, order | {"output": f"{folder}/%j.out"}))["id"])
        return ids, (await asyncio.wait_for(event, 180)).payload

    ids, payload = asyncio.run(watch())
    assert (payload["id"], payload["ended"], payload["name"]) == (ids[2], "COMPLETED", "watched-good")


class Kept(dict):
    """As a trigger's `asset_state_store` is from Airflow 3.3 on. The first request of each kind fails."""

    failed = frozenset()

    async def aget(self, key, default=None):
        self._fail_once("aget")
        return self.get(key, default)

    async def aset(self, key, value):
        self._fail_once("aset")
        self[key] = json.loads(json.dumps(value))

    def _fail_once(self, kind):
        if kind not in self.failed:
            self.failed |= {kind}
            raise ConnectionError("Airflow's API server is away")


def test_an_asset_watcher_that_was_away_hears_of_each_end_once(folder, instance, hook, until):
    """One job ends while it is away, one begins and ends, one is still running when it comes back."""
    gates = [folder / f"missed-{number}" for number in range(4)]
    kept = Kept()

    def begin(number):
        script = f"#!/bin/bash\nuntil [ -e {gates[number]} ]; do sleep 0.2; done\n"
        order = {"key": f"missed:{number}:{time.time()}", "name": "missed", "script": script}
        return hook.submit(order | {"output": f"{folder}/%j.out"})["id"]

    def end(number, job_id):
        gates[number].touch()
        until(lambda: hook.job(job_id)["state"] == "ended")

    async def heard(during, most):
        """The jobs of the first events of a triggerer's life, while `during` runs."""
        trigger = PenstockJobEventTrigger("missed", poll_interval_s=0.3)
        trigger.asset_state_store = kept
        jobs = []

        async def hear():
            async for event in trigger.run():
                jobs.append(event.payload["id"])

        task = asyncio.create_task(hear())
        while not kept:  # it has not looked yet
            await asyncio.sleep(0.1)
        await asyncio.to_thread(during)
        for _ in range(900):
            if len(jobs) >= most:
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(2)  # nothing more may come
        task.cancel()
        return jobs

    first, second = begin(0), begin(1)
    assert asyncio.run(heard(lambda: end(0, first), 1)) == [first]
    end(1, second)
    third, fourth = begin(2), begin(3)
    end(2, third)
    assert sorted(asyncio.run(heard(lambda: None, 2))) == sorted([second, third])
    assert asyncio.run(heard(lambda: end(3, fourth), 1)) == [fourth]
