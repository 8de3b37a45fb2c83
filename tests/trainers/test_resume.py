"""Stopping anywhere and going on gives what never stopping gives; a checkpoint that isn't one's own is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.errors import FleetMismatch
from composer_replication.store import MemoryStore
from tests.trainers.harness import Core, Kind, Share, adamw, assert_same_bits, flat, in_threads, weights

pytestmark = [
    # Both say that the folder holds files, or that a draft of theirs went away.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


class Stop(Exception):
    """What a preemption does, at a known batch."""


def run(kind: Kind, folder: Path, stops: tuple[int, ...], *, replicas: int = 2) -> list[tuple[Any, ...]]:
    """40 steps (two epochs) of AdamW in rounds of about 3, killed after these numbers of batches; a checkpoint of the
    Trainer's own is written after each. What each replica saw, its losses, its weights, its adapter."""
    seen: dict[int, list[list[int]]] = {index: [] for index in range(replicas)}
    losses: dict[int, list[float]] = {index: [] for index in range(replicas)}
    ends: list[Any] = []
    began = 0
    for stop in [*stops, None]:

        def replica(index: int, collective: Any, stop: int | None = stop, began: int = began) -> Any:
            core = Core(seed=index)
            ours = kind.ours(
                collective, policy="autoloco", base_horizon=3, horizon_step=1, token_fn=lambda batch: len(batch["id"])
            )
            path = folder / f"{index}-{{}}.ckpt"

            def end(number: int, control: Any) -> None:
                if stop is not None and began + number + 1 == stop:
                    control.save(Path(str(path).format(stop)))
                    raise Stop

            try:
                fitted = kind.fit(
                    core,
                    Share(20 * 2 * replicas, index, replicas, batch_size=2, shuffle=True),
                    ours,
                    optimize=adamw,
                    epochs=2,
                    after=end,
                    resume=Path(str(path).format(began)) if began else None,
                )
                assert stop is None and fitted.ours is ours
            except Stop:
                assert stop is not None
            seen[index] += core.seen
            losses[index] += core.losses
            return weights(core), ours

        ends = in_threads(replicas, replica)
        began = stop or 0
    return [(seen[index], losses[index], *ends[index]) for index in range(replicas)]


def test_stops_inside_intervals_change_nothing(kind: Kind, tmp_path: Path) -> None:
    straight = run(kind, tmp_path, ())
    stopped = run(kind, tmp_path, (7, 13, 22))  # the last one in the second epoch
    for (saw, lost, end, ours), (saw_again, lost_again, same, resumed) in zip(straight, stopped, strict=True):
        assert saw == saw_again and len(saw) == 40
        assert lost == lost_again
        assert_same_bits(end, same)
        assert (resumed.final.digest, resumed.final.rounds) == (ours.final.digest, ours.final.rounds)
    epoch = [flat(saw[:20]) for saw, *_ in stopped]
    assert sorted(epoch[0] + epoch[1]) == list(range(80))  # once each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["fit_state"]["loop"].update(replica=1), "checkpoint of replica 1 can't resume replica 0"),
        (lambda saved: saved.update(version=7), "version 7, this package reads 1"),
    ],
)
def test_a_checkpoint_of_another_replica_or_version_is_refused(
    kind: Kind, tmp_path: Path, change: Any, message: str
) -> None:
    run(kind, tmp_path, (5,), replicas=1)
    path = tmp_path / "0-5.ckpt"
    # Composer's hold times and versions of its own.
    checkpoint = torch.load(path, weights_only=kind.name == "lightning")
    if kind.name == "lightning":
        change(checkpoint["callbacks"]["AutoLoCo"])
    else:
        change(dict(checkpoint["state"]["algorithms"])["AutoLoCo"])
    torch.save(checkpoint, path)
    core = Core()
    with pytest.raises(FleetMismatch, match=message):
        kind.fit(
            core,
            Share(40, batch_size=2, shuffle=True),
            kind.ours(InProcessFleet(1).collectives()[0], policy="autoloco", base_horizon=3, horizon_step=1),
            optimize=adamw,
            epochs=2,
            resume=path,
        )
    assert core.seen == []


class Breaking(Core):
    def begin(self, number: int) -> None:
        if number == 9:
            raise RuntimeError("out of memory")


def test_a_fresh_start_in_a_run_that_is_under_way_says_what_it_lost(kind: Kind) -> None:
    """Its weights are the fleet's, but its inner optimizer's state is gone."""
    store = MemoryStore()

    def ours() -> Any:
        more = {"policy": "fixed", "base_horizon": 4, "checkpoint_every": 1}
        return kind.adapter(store, replica=0, replicas=1, **more)

    first = ours()
    with pytest.raises(RuntimeError, match="out of memory"):
        kind.fit(Breaking(), Share(24), first)
    assert first.rounds and first.said == []
    second = ours()
    with pytest.warns(UserWarning, match="no checkpoint of its own: joined the fleet at round"):
        kind.fit(Core(), Share(24), second)
    joined = second.rounds[0].round
    assert joined > 0
    (said,) = second.said
    assert f"joined the fleet at round {joined}; its optimizer starts anew" in said and "latest_checkpoint" in said
