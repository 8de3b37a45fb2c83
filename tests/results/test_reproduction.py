"""docs/results.md says what the kept runs say, and their decisions are the policies' own, on this machine too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.reproduction import study
from benchmarks.reproduction.measures import spread
from benchmarks.reproduction.run import Job, jobs, read
from benchmarks.reproduction.tables import PAGE, blocks
from composer_replication.diloco.round_record import RoundRecord, replay
from composer_replication.recipe import outer_config, policy_of
from composer_replication.simulation import simulate

JOBS = [job for job in jobs(study.GROUPS) if job.path.exists()]


def test_the_page_s_tables_are_those_of_the_kept_runs() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in blocks().items():
        assert f"<!-- begin {name} -->\n\n{text}\n\n<!-- end {name} -->" in page, name


def test_the_page_s_figures_are_those_of_the_kept_runs() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.reproduction.figures import outdated

    assert outdated() == []


def test_every_kept_file_is_a_run_of_the_study() -> None:
    files = set(study.KEPT.rglob("*.json.gz"))
    assert files and files == {job.path for job in JOBS}


def test_the_runs_that_the_page_rests_on_are_all_there() -> None:
    assert [job for job in jobs(["main"]) if not job.path.exists()] == []


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.group}/{job.variant}-{job.seed}")
def test_replayed_observations_give_the_same_rounds(job: Job) -> None:
    run: Any = read(job)
    recipe = job.recipe()
    steps = recipe.training.steps
    if run["policy"]["name"] == "ddp":
        assert run["losses"][-1][0] == steps == run["result"]["synchronisations"]
        return
    kept = [RoundRecord.from_json(one) for one in run["rounds"]]
    again = replay(policy_of(recipe), outer_config(recipe), [one.observed for one in kept])
    written = [{name: value for name, value in one.items() if name != "bytes_sent"} for one in run["rounds"]]
    assert [json.loads(one.to_line()) for one in again] == written
    assert [one.steps for one in kept[1:]] == [one.next_steps for one in again[:-1]]
    assert sum(one.steps for one in kept) == steps == kept[-1].position
    assert run["result"]["bytes_sent"] == sum(one["bytes_sent"] for one in run["rounds"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_trained_anew_falls_within_the_spread() -> None:
    """Other processors round differently, so not the bits; on the machine that trained them it is the same run."""
    job = Job("main", "autoloco", 1)
    kept = [read(Job("main", "autoloco", seed)) for seed in study.SEEDS]
    losses = spread([run["result"]["validation_loss"] for run in kept if run])
    counts = [len(run["rounds"]) for run in kept if run]
    again = simulate(job.recipe())
    margin = max(3 * losses.deviation, 0.02)
    assert abs(again.validation_loss - losses.mean) <= margin
    assert min(counts) * 0.9 <= len(again.rounds) <= max(counts) * 1.1
