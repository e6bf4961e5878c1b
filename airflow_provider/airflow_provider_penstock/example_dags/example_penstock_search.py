"""Search over learning rates. Each trial is a Python function in a Slurm job of its own; then the best is chosen."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import DAG, task

with DAG(
    "example_penstock_search",
    schedule=None,
    catchup=False,
    params={"folder": "/shared/airflow", "python": "python3"},
) as dag:

    @task.penstock(
        shared_folder="{{ params.folder }}",
        python="{{ params.python }}",
        output_file="{{ params.folder }}/%j.out",
        min_gpus=1,
        max_gpus=2,
        retries=1,
    )
    def trial(learning_rate: float) -> dict[str, float]:
        """Stands for a training."""
        return {"learning_rate": learning_rate, "loss": (learning_rate - 0.1) ** 2}

    @task
    def best(trials: list[dict[str, float]]) -> dict[str, float]:
        """The trial of the smallest loss."""
        return min(trials, key=lambda trial: trial["loss"])

    best(trial.expand(learning_rate=[0.01, 0.1, 1.0]))
