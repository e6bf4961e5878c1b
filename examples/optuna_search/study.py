"""A hyperparameter search whose trials are jobs. Run it where penstockd's API is reachable, such as on the login node.

python study.py --trials 20 --at-once 4
"""

import argparse
import os
import sys
from pathlib import Path

import optuna

from penstock_scheduler.api.messages import Submission
from penstock_scheduler.api.search import JobObjective, TrialFailed
from penstock_scheduler.model import JobSpec

HERE = Path(__file__).resolve().parent
EPOCH = 2048  # samples


def main():
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="a folder on a file system that all nodes share"
    )
    parser.add_argument("--partition", help="partition of the jobs (the site's default)")
    parser.add_argument("--epoch-s", default="0", help="shortest time of an epoch, in seconds")
    parser.add_argument("--storage", help="Optuna's database, to continue the study later")
    options = parser.parse_args()
    folder = options.folder.resolve()

    def submission(trial):
        rate = trial.suggest_float("rate", 1e-4, 10.0, log=True)
        width = trial.suggest_float("width", 0.05, 20.0, log=True)
        mine = folder / f"trial-{trial.number}"
        train = f"{sys.executable} {HERE / 'train.py'} --checkpoints {mine} --rate {rate} --width {width}"
        return Submission(
            script=f"#!/bin/bash\nexec {train} --epoch-s {options.epoch_s}\n",
            spec=JobSpec(max_gpus=1),
            partition=options.partition,
            working_directory=str(folder),
            output=str(folder / "%j.out"),
            environment={name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
        )

    study = optuna.create_study(
        study_name="moons",
        direction="maximize",
        storage=options.storage,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
    )
    objective = JobObjective(submission, samples_per_step=EPOCH)
    study.optimize(objective, n_trials=options.trials, n_jobs=options.at_once, catch=TrialFailed)
    for trial in study.trials:
        last = max(trial.intermediate_values, default=0)
        print(trial.number, trial.state.name, trial.user_attrs.get("penstock_job"), f"epoch {last}", trial.value)
    print(f"best: {study.best_value:.4f} with {study.best_params}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
