"""Stopping inside an interval and going on gives what never stopping gives."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

import torch
from composer.callbacks import CheckpointSaver
from composer.core import Event, State
from composer.core.engine import sigterm_handler
from composer.optim import CosineAnnealingWithWarmupScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from composer_replication.adapter.files import latest_checkpoint
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.composer import replica_sampler
from composer_replication.store import MemoryStore
from tests.composer.helpers import At, Regression, algorithm, assert_same_bits, in_threads, trainer, weights
from tests.lightning.helpers import Numbered
from tests.support import servers

OPTIONS: dict[str, Any] = {"policy": "autoloco", "base_horizon": 4, "horizon_step": 1, "token_fn": lambda batch: 2}


class Stop(Exception):
    """What a preemption does, at a known batch."""


class Dropping(Regression):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(self.net[0], nn.Dropout(0.3), self.net[1], self.net[2])


def savers(state: State) -> list[CheckpointSaver]:
    return [one for one in state.callbacks if isinstance(one, CheckpointSaver)]


def run(
    folder: Path | str,
    stops: tuple[int, ...],
    *,
    replicas: int = 2,
    ours: bool = False,
    dropout: bool = False,
    every: int = 1,
) -> list[tuple[Any, ...]]:
    """24 batches (two epochs), stopped before these; (samples seen, final weights, algorithm) of each replica."""
    seen: dict[int, list[list[int]]] = {index: [] for index in range(replicas)}
    ends: list[Any] = []
    for stop in [*stops, None]:

        def replica(index: int, collective: Any, stop: int | None = stop) -> Any:
            model = (Dropping if dropout else Regression)(seed=index)
            method = algorithm(collective, checkpoint_dir=folder if ours else None, **OPTIONS)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            sampler = replica_sampler(Numbered(24 * replicas), shuffle=True, replica=index, replicas=replicas)

            def halt(state: State) -> None:
                if state.timestamp.batch == stop:
                    for saver in savers(state):
                        saver.fit_end(state, made.logger)  # uploads run behind: let them come in
                    raise Stop

            if ours:
                saving: dict[str, Any] = {"load_path": latest_checkpoint(folder, index)}
            else:
                saving = {"save_folder": f"{folder}/{{run_name}}", "save_interval": f"{every}ba", "autoresume": True}
            made = trainer(
                model,
                DataLoader(Numbered(24 * replicas), batch_size=2, sampler=sampler),
                method,
                At(Event.BATCH_START, halt),
                optimizers=optimizer,
                schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="4ba", t_max="24ba", alpha_f=0.1),
                run_name=f"job-replica{index}",
                seed=3,
                max_duration="24ba",
                **saving,
            )
            for saver in savers(made.state):
                # A link to the newest checkpoint is sent once that is there: looked for every 30 seconds.
                saver._symlink_upload_wait_before_next_try_in_seconds = 0.2
            try:
                made.fit()
                assert stop is None
            except Stop:
                assert stop is not None
            made.close()
            seen[index] += model.seen
            return weights(model), method

        ends = in_threads(replicas, replica)
    return [(seen[index], *ends[index]) for index in range(replicas)]


def test_autoresume_inside_intervals_changes_nothing(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", ())
    stopped = run(tmp_path / "stopped", (5, 15))  # inside an interval, and inside the second epoch as well
    for (saw, ends, method), (saw_again, same, resumed) in zip(straight, stopped, strict=True):
        assert saw == saw_again
        assert_same_bits(ends, same)
        assert method.final is not None and resumed.final is not None
        assert (resumed.final.digest, resumed.final.rounds) == (method.final.digest, method.final.rounds)
        assert resumed.rounds[-1].metrics()["autoloco/interval_tokens"] > 0


@pytest.mark.timeout(600)
@pytest.mark.slow  # the uploader's processes import Composer once more
@pytest.mark.servers
def test_autoresume_from_s3_inside_an_interval_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := servers.missing_for("moto"):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)  # whatever Composer writes on its way
    with servers.moto("checkpoints") as endpoint:
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        (saw_again, same, _), *_ = run("s3://checkpoints/runs", (6,), replicas=1, every=5)
    (saw, ends, _), *_ = run(tmp_path / "straight", (), replicas=1)
    assert_same_bits(ends, same)
    # Stopped in batch 7; the last checkpoint was of batch 5.
    assert saw_again == saw[:6] + saw[5:]


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", (), replicas=1, dropout=True)
    stopped = run(tmp_path / "stopped", (6, 17), replicas=1, dropout=True)
    assert_same_bits(straight[0][1], stopped[0][1])


def test_our_own_files_go_back_to_the_last_round(tmp_path: Path) -> None:
    """They are written after rounds: a restart trains the interval that was cut short again, with the same samples."""
    straight = run(tmp_path / "straight", (), ours=True)
    stopped = run(tmp_path / "stopped", (6,), ours=True)
    for (saw, ends, _), (saw_again, same, _) in zip(straight, stopped, strict=True):
        assert_same_bits(ends, same)
        assert saw_again == saw[:6] + saw[4:]
    names = sorted(path.name for path in (tmp_path / "stopped" / "replica-1").iterdir())
    assert len(names) == 2 and names[-1].endswith("-step-000000024.ckpt")


def test_the_algorithm_s_state_is_tensors_and_primitives(tmp_path: Path) -> None:
    run(tmp_path, (), replicas=1)
    state = torch.load(tmp_path / "job-replica0" / "ep0-ba5-rank0.pt", weights_only=False)["state"]
    saved = dict(state["algorithms"])["AutoLoCo"]
    torch.save(saved, tmp_path / "part.pt")
    again = torch.load(tmp_path / "part.pt", weights_only=True)
    assert again["version"] == 1 and isinstance(again["fit_state"]["loop"]["anchor"]["net.0.weight"], Tensor)


class Told(MemoryStore):
    """SIGTERM comes while replica 0, in the main thread, looks for the others' contributions."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.told = False, threading.Event()

    def get(self, *arguments: Any, **settings: Any) -> bytes:
        if self.waiting and threading.current_thread() is threading.main_thread() and not self.told.is_set():
            self.told.set()
            signal.raise_signal(signal.SIGTERM)
        return super().get(*arguments, **settings)


def test_sigterm_ends_a_wait_and_the_restart_counts_the_interval_once(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store, restarted = Told(), threading.Event()

    def replica(index: int, where: Any, collective: Any = None) -> Any:
        options = {"policy": "fixed", "base_horizon": 4}
        if collective is None:
            collective = ObjectStoreCollective(
                where, replica=index, replicas=2, heartbeat_seconds=0.1, poll_seconds=0.01
            )
            publish = collective.publish

            def published(status: Any) -> None:
                publish(status)
                states.append(status["state"])
                store.waiting = index == 0 and status["state"] == "waiting"

            collective.publish = published  # type: ignore[method-assign]
        model, method = Regression(seed=index), algorithm(collective, **options)
        sampler = replica_sampler(Numbered(24), replica=index, replicas=2)

        def hold(state: State) -> None:
            if index == 1 and where is not None and state.timestamp.batch == 2:
                assert restarted.wait(60)

        made = trainer(
            model,
            DataLoader(Numbered(24), sampler=sampler),
            At(Event.BATCH_START, hold),
            method,
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.02),
            run_name=f"job-replica{index}",
            max_duration="12ba",
            **(
                {"save_folder": str(tmp_path / f"job-{index}"), "save_interval": "1ba", "autoresume": True}
                if where
                else {}
            ),
        )
        try:
            made.fit()
        finally:
            made.close()
        return method.final

    states: list[str] = []
    # Composer sets it when it is imported; another library's test may have set its own since.
    previous = signal.signal(signal.SIGTERM, sigterm_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, previous))
    undisturbed = in_threads(2, lambda index, collective: replica(index, None, collective))[0]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(replica, 1, store)
        with pytest.raises(SystemExit) as told:
            replica(0, store)
        assert told.value.code == 143 and states[-1] == "preempted" and store.told.is_set()
        restarted.set()
        first = replica(0, store)
        second = other.result(timeout=60)
    assert first.digest == second.digest == undisturbed.digest


def test_weights_alone_start_a_new_run(tmp_path: Path) -> None:
    run(tmp_path, (), replicas=1)
    path = tmp_path / "job-replica0" / "latest-rank0.pt"

    def replica(index: int, collective: Any) -> Any:
        method, model = algorithm(collective, **OPTIONS), Regression(seed=5)
        made = trainer(
            model,
            DataLoader(Numbered(8), batch_size=2),
            method,
            load_path=str(path),
            load_weights_only=True,
            max_duration="4ba",
        )
        loaded = weights(model)
        made.fit()
        made.close()
        return loaded, method

    (loaded, method), *_ = in_threads(1, replica)
    saved = torch.load(path, weights_only=False)["state"]["model"]
    assert_same_bits(saved, loaded)
    assert [summary.round for summary in method.rounds] == [0]
