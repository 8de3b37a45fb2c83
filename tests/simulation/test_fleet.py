"""A simulated fleet is the real one, without its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.diloco.serverless import LocalProcessExecutor, ReplicaSpec
from composer_replication.diloco.summary import RoundSummary
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe, load_recipe, to_yaml
from composer_replication.simulation import simulate

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SMALL = [
    "fleet.replicas=2",
    "training.steps=20",
    "scheduler.warmup_steps=2",
    "autoloco.warmup_steps=2",
    "autoloco.base_horizon=4",
    "model.args.width=32",
    "data.args.max_bytes=60000",
    "data.args.validation_bytes=2000",
]


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, [*SMALL, *overrides])


@pytest.mark.processes
@pytest.mark.timeout(500)
def test_it_ends_with_the_bits_of_a_launch(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    # Two micro-batches a step, the end of an epoch, a clipped norm, int8.
    ours = recipe("training.accumulate=2", "data.args.batch_size=8", "training.gradient_clip=0.5")
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(ours))
    executor = LocalProcessExecutor(output=tmp_path / "run", env={"OMP_NUM_THREADS": "1"})
    specs = [ReplicaSpec(i, 2, (tmp_path / "store").as_uri(), recipe=str(path)) for i in range(2)]
    results = executor.collect(executor.launch_replicas(specs), timeout=400)  # a busy machine is slow to start them
    told: list[RoundSummary] = []
    simulated = simulate(ours, told=told.append)
    assert {result.metrics["digest"] for result in results} == {simulated.digest}
    assert tuple(told) == simulated.rounds and len(told) == results[0].metrics["rounds"]
    assert simulated.validation_loss == pytest.approx(results[0].metrics["validation_loss"], rel=1e-6)
    assert simulated.bytes_sent > 0 and simulated.elements > 10_000


def test_seeds_and_replicas_go_over_the_recipe_s() -> None:
    first, again, other = (simulate(recipe("training.steps=8"), replicas=3, seed=seed) for seed in (5, 5, 6))
    assert first.digest == again.digest != other.digest
    assert (first.replicas, first.seed, first.steps) == (3, 5, 8)
    assert all(len(one.members) == 3 for one in first.rounds)


def test_what_it_cannot_simulate_is_said() -> None:
    for overrides, words in (
        (["training.precision=bf16-mixed"], "training.precision: simulate trains in 32-true"),
        (["training.trainer_args.deterministic=true"], "training.trainer_args: simulate has no Trainer"),
        (["fleet.failure_policy=skip"], "nothing fails in a simulation"),
        (["model.args.dropout=0.1"], "the model draws random numbers as it trains"),
    ):
        with pytest.raises(RecipeError, match=words):
            simulate(recipe(*overrides))


def test_one_replica_s_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_replication.simulation import fleet

    def fails(logits, labels):
        raise ArithmeticError("for the test")

    monkeypatch.setattr(fleet, "next_token_loss", fails)
    with pytest.raises(ArithmeticError, match="for the test"):
        simulate(recipe("training.steps=4"))


class Spike:
    """A disturbance: the learning rate of some steps, and whom it was asked about."""

    def __init__(self, factor: float) -> None:
        self.factor, self.asked = factor, set[tuple[int, int]]()

    def batch(self, replica, step, batch):
        self.asked.add((replica, step))
        return batch

    def rate(self, replica: int, step: int) -> float:
        return self.factor if step == 3 else 1.0


def test_a_disturbance_reaches_every_step_and_leaves_the_schedule_alone() -> None:
    ours = recipe("training.steps=8")
    plain, idle, spike = simulate(ours), Spike(1.0), Spike(10.0)
    assert simulate(ours, disturbance=idle).digest == plain.digest
    assert idle.asked == {(replica, step) for replica in range(2) for step in range(8)}
    disturbed = simulate(ours, disturbance=spike)
    assert disturbed.digest != plain.digest
    masses = [[one.observation.mass for one in run.rounds if one.observation] for run in (plain, disturbed)]
    assert len(masses[0]) == 1 and masses[1][0] > masses[0][0]  # what was executed, not what was planned
    assert [one.next_plan.mass for one in disturbed.rounds] == [one.next_plan.mass for one in plain.rounds]
