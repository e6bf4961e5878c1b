"""Random faults on two penstockd, PostgreSQL and slurmctld, while jobs are submitted and run; and what must hold afterwards.

All random choices come from one seed. `faults.log` has one line of JSON for each fault.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from penstock_scheduler.api.client import ApiError, Client, DaemonAway
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.model import StopCode
from penstock_scheduler.store.leadership.lease import boot_s
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway.base import ENDED
from tests.end_to_end.pair import Member, Pair
from tests.end_to_end.site import RATES, UNFORESEEN
from tests.end_to_end.storm import check_round

NODES = "t4:2x8,a100:1x8"
LONG = 4
"""Jobs that run all the time."""
SHORT_EVERY_S = 3.0
"""Time between two submissions of short jobs."""
STEPS_S = -300.0, 0.0, 300.0
"""To what a daemon's clock is set, relative to the machine's."""


@dataclass
class Faults:
    """Faults on `two`.

    Args:
        count: how many.
        seed: of all random choices.
        longest_s: the longest freeze, cut or absence.
        patient: share of the faults after which one waits until another one leads and a standby is there again. The others come
            on top of what is still wrong.
    """

    two: Pair
    count: int
    seed: int
    longest_s: float = 60.0
    patient: float = 0.6
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Fault -> seconds until another one led and decided."""
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._over = threading.Event()
        self._timers: list[threading.Timer] = []
        self._log = self.two.folder / "faults.log"
        self.long: list[str] = []
        self.short: list[str] = []
        self.keys: dict[str, str] = {}
        """Key -> job, of those that were submitted over the API."""
        self._controllers = threading.Lock()
        """Held while the first controller is away."""
        self._trouble: list[BaseException] = []
        self._submitting = threading.Thread(target=self._submit_again_and_again, daemon=True)

    def rage(self) -> None:
        """Do it all, then put everything right."""
        site = self.two.site
        self.long = [site.submit(40_000.0, max_gpus=1) for _ in range(LONG)]
        site.wait_states("RUNNING", *self.long)
        self._submitting.start()
        kinds: list[tuple[Callable[[], None], float]] = [
            (self._kill, 4.0),
            (self._freeze, 5.0),
            (self._controller, 2.0),
            (self._clock, 3.0),
            (self._terminate, 1.0),
        ]
        if self.two.server is not None:
            kinds += [
                (self._cut, 3.0),
                (self._slow, 1.0),
                (self._drop, 1.0),
                (self._database, 2.0),
                (self._hand_over, 1.0),
            ]
        for _ in range(self.count):
            happen, _ = self._chance.choices(kinds, [weight for _, weight in kinds])[0]
            happen()
            if self._chance.random() < self.patient:
                self._recover()
            else:
                time.sleep(self._chance.uniform(0.2, 3.0))
        self._over.set()
        for timer in self._timers:
            timer.join()
        for member in self.two.members.values():
            member.set_clock(0.0)
        self._recover()
        self._submitting.join()

    # --- faults

    def _either(self) -> Member:
        """Mostly the leader."""
        leader = self.two.leader()
        if leader is not None and self._chance.random() < 0.8:
            return leader
        return self.two.members[self._chance.choice([*self.two.members])]

    def _seconds(self) -> float:
        """Mostly short, sometimes long."""
        return 1.0 + (self.longest_s - 1.0) * self._chance.random() ** 3

    def _kill(self) -> None:
        member = self._either()
        self._measured("kill -9", member, lambda: member.send(signal.SIGKILL), inf_s=True)

    def _freeze(self) -> None:
        member, seconds = self._either(), self._seconds()

        def freeze() -> None:
            process = member.process
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGSTOP)
                self._later(seconds, lambda: process.send_signal(signal.SIGCONT))

        self._measured("SIGSTOP", member, freeze, seconds)

    def _cut(self) -> None:
        member, seconds = self._either(), self._seconds()

        def cut() -> None:
            member.proxy.cut()
            self._later(seconds, member.proxy.mend)

        self._measured("database cut off", member, cut, seconds)

    def _slow(self) -> None:
        member, seconds = self._either(), self._seconds()
        member.proxy.delay_s = self._chance.uniform(0.05, 1.0)
        self._later(seconds, lambda: setattr(member.proxy, "delay_s", 0.0))
        self._say("database slow", member=member.name, s=seconds, delay_s=member.proxy.delay_s)

    def _drop(self) -> None:
        member = self._either()
        self._say("connections dropped", member=member.name)
        member.proxy.drop()

    def _database(self) -> None:
        seconds = self._chance.uniform(0.0, 8.0)
        self._say("database restart", s=seconds)
        self.two.server.stop()
        time.sleep(seconds)
        self.two.server.start()

    def _controller(self) -> None:
        """The controller ends, in order: a killed one forgets jobs. Its backup takes over after 5 s if there is one."""
        seconds = self._chance.uniform(1.0, 15.0)
        if not self._controllers.acquire(blocking=False):
            self._say("slurmctld away", s=0.0, skipped=True)
            return
        self._say("slurmctld away", s=round(seconds, 1))

        def back() -> None:
            try:
                self.two.slurm.start_slurmctld()
            finally:
                self._controllers.release()

        self.two.slurm.stop_slurmctld()
        self._later(seconds, back)

    def _clock(self) -> None:
        member, ahead_s = self._either(), self._chance.choice(STEPS_S)
        self._say("clock step", member=member.name, ahead_s=ahead_s)
        member.set_clock(ahead_s)

    def _hand_over(self) -> None:
        leader, standby = self.two.leader(), self.two.stands_by()
        if leader is None or standby is None:
            self._say("leader move", s=0.0, skipped=True)
            return

        def move() -> None:
            with suppress(ApiError, DaemonAway), Client(f"unix:{leader.socket}") as client:
                client.move_leader()

        self._measured("leader move", leader, move, inf_s=True)

    def _terminate(self) -> None:
        member = self._either()
        self._measured("SIGTERM", member, lambda: member.send(signal.SIGTERM), inf_s=True)

    def _measured(
        self, what: str, member: Member, cause: Callable[[], object], seconds: float = 0.0, *, inf_s: bool = False
    ) -> None:
        """Cause a fault. If the leader was hit, a standby was ready, and it lasts: wait for the takeover, and note its time.

        One that is alone is started again. Nobody takes over while it is frozen.
        """
        if self.two.server is None:
            counts = inf_s and self.two.leader() is not None and self._healthy()
        else:
            standby = self.two.stands_by()
            lasts = inf_s or seconds > 1.5 * self.two.lease_s
            counts = lasts and standby is not None and standby is not member and self._healthy()
        self._say(what, member=member.name, s=round(seconds, 1), counts=counts)
        if not counts:
            cause()
            return
        self.took_s[what].append(self.two.takeover_s(cause, timeout_s=120))

    def _healthy(self) -> bool:
        return not any(timer.is_alive() for timer in self._timers)

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        timer.start()
        self._timers.append(timer)

    def _recover(self) -> None:
        begun_s = boot_s()
        self.two.wait_ready(240)
        self._say("recovered", took_s=round(boot_s() - begun_s, 1))

    def _say(self, what: str, **more: object) -> None:
        if what != "recovered":
            self.done[what] += 1
        with self._log.open("a") as file:
            file.write(json.dumps({"time": time.strftime("%H:%M:%S"), "what": what} | more) + "\n")

    # --- jobs

    def _submit_again_and_again(self) -> None:
        try:
            self._submit_all()
        except BaseException as error:
            self._trouble.append(error)

    def _submit_all(self) -> None:
        number = 0
        while not self._over.wait(SHORT_EVERY_S):
            number += 1
            if number % 2:
                self._by_key(f"night-{number}")
            else:
                with self._controllers:  # sbatch gives up after 9 s
                    self.short.append(self.two.site.submit(3.0, max_gpus=1))

    def _by_key(self, key: str) -> None:
        """Submit over the API, again and again with the same key until there is an answer."""
        site = self.two.site
        spec = {"max_gpus": 1, "goodput_table": RATES, "checkpointable": True}
        words = site.trainer(3.0).removeprefix("exec ")
        environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        order = Submission(
            key=key,
            script=f"#!/bin/sh\n{words}\n",
            spec=spec,  # type: ignore[arg-type]
            output=f"{site.folder}/%j.out",
            partition="all",
            environment=environment,
        )
        until_s = boot_s() + 300
        while boot_s() < until_s:
            try:
                with Client(self.two.url(), timeout_s=20) as client:
                    self.keys[key] = client.submit(order).id
                    return
            except DaemonAway:
                time.sleep(0.5)
            except ApiError as error:
                if error.status not in (409, 429, 503, 504):
                    raise
                time.sleep(0.5)
        raise TimeoutError(f"{key} was not taken in 300 s")

    # --- what must hold

    def check(self) -> None:
        """No two wrote at once; no job was lost, doubled, or stopped without a reason; no report was lost."""
        if self._trouble:
            raise self._trouble[0]
        two, site = self.two, self.two.site
        short = [*self.short, *self.keys.values()]
        site.wait_completed(*short, timeout_s=300)
        two.assert_one_writer()
        known = {job.id: job for job in site.gateway.jobs(finished=True)}
        assert set(known) == {*self.long, *short}, "no job was lost or doubled"
        assert self.short, "jobs were submitted by sbatch"
        assert self.keys, "jobs were submitted over the API"
        by_key = Counter(
            key for job in known.values() if (key := json.loads(job.comment or "{}").get("penstock_key")) is not None
        )
        assert by_key == dict.fromkeys(self.keys, 1), "each key is one job"
        store = open_store(site.store)
        stops = Counter(
            line.action.job
            for line in store.outcomes()
            if line.stop is not None and ("leaves its GPUs" in line.text or line.stop.code is StopCode.NO_GPUS)
        )
        for job in known.values():
            assert job.restarts <= stops[job.id], (
                f"job {job.id} was stopped {job.restarts} times: {stops[job.id]} reasons"
            )
            assert job.id not in self.long or job.state not in ENDED, f"job {job.id} has ended"
        bare = [line for line in store.outcomes() if ", leaves its GPUs" in line.text and line.stop is None]
        assert not bare, f"stops without a reason: {bare}"
        site.assert_no_run_twice(*self.long, *short)
        numbers = store.round_numbers()
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "no round is missing"
        for number in numbers:
            check_round(store.round(number))
        assert UNFORESEEN not in two.log.read_text(), site.tail()

    def table(self) -> str:
        """Takeover times, for docs/measurements."""
        lines = ["| fault | number | takeovers | median, s | worst, s |", "| --- | --- | --- | --- | --- |"]
        for what, count in sorted(self.done.items()):
            times = self.took_s.get(what, [])
            shown = (f"{median(times):.1f}", f"{max(times):.1f}") if times else ("–", "–")
            lines.append(f"| {what} | {count} | {len(times)} | {' | '.join(shown)} |")
        return "\n".join(lines)
