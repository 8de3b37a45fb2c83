"""`launch`: a fleet under way, watched to its end, whoever runs it.

Invariant: however watching ends, every replica that still ran was asked to stop; processes of this machine are gone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_replication.cli.live import FleetView, Row, Screen
from composer_replication.cli.places import RECIPE_FILE, short
from composer_replication.cli.rounds_file import RoundsFile
from composer_replication.cli.summary import summarise
from composer_replication.cli.view import RunReader
from composer_replication.diloco.serverless.executor import BaseExecutor, CollectTimeout
from composer_replication.diloco.serverless.exit_codes import describe
from composer_replication.diloco.serverless.handle import ReplicaHandle, ReplicaResult
from composer_replication.diloco.serverless.jobs.verdict import Budgets
from composer_replication.diloco.serverless.local_process import LocalProcessExecutor
from composer_replication.diloco.serverless.mixed import MixedExecutor
from composer_replication.diloco.serverless.spec import ReplicaSpec
from composer_replication.errors import ReplicationError
from composer_replication.readable import duration
from composer_replication.recipe import Recipe
from composer_replication.store import ObjectStore

__all__ = ["Watch", "allowed_failures"]

_LOOK_SECONDS = 0.5
_LOOK_SECONDS_ELSEWHERE = 2.0
_STARTING_SECONDS = 5.0  # after which it is said what a start waits for; then after twice as long, and so on
_ENDING_SECONDS = 60.0  # beyond the grace time: what services take to say that a job has ended


class _Stop(BaseException):
    """SIGTERM: stop the fleet, then end."""


def _on_sigterm(number: int, frame: Any) -> None:
    raise _Stop


def allowed_failures(recipe: Recipe) -> int:
    """How many replicas the fleet can do without."""
    if recipe.fleet.failure_policy != "skip":
        return 0
    replicas = recipe.fleet.replicas
    return replicas - (recipe.fleet.min_replicas or replicas // 2 + 1)


class Watch:
    """Launches replicas and shows them: `Watch(...).run(specs)` gives the exit code."""

    def __init__(self, recipe: Recipe, folder: Path, store: ObjectStore, executor: BaseExecutor) -> None:
        self.recipe = recipe
        self.folder = folder
        self.reader = RunReader(store)
        self.rounds = RoundsFile(folder, recipe.name)
        self.executor = executor
        self.handles: list[ReplicaHandle] = []
        self.began = time.monotonic()
        self._local = _processes(executor)
        self._remote = not isinstance(executor, LocalProcessExecutor)
        self._told: dict[int, int] = {}
        self._tell_start_after = _STARTING_SECONDS
        self._seen = FleetView(title=recipe.name, rows=())

    def run(self, specs: list[ReplicaSpec], *, plain: bool) -> int:
        before = signal.signal(signal.SIGTERM, _on_sigterm)
        code = 1
        try:
            self.handles = self.executor.launch_replicas(specs)
            with Screen(plain) as screen:
                code = self._watch(screen)
        except (KeyboardInterrupt, _Stop) as stop:
            code = 130 if isinstance(stop, KeyboardInterrupt) else 143
            if not self.handles:  # in the middle of launching: what was taken by then is in the store
                self.handles = self._attached()
            grace = self.recipe.executor.grace_seconds
            self._stop(f"stopping; a replica has {grace:g} s to write its checkpoint (again: {self._impatience})")
            self._look_once_more()
            print(f"interrupted. Go on with: composer-replication launch {short(self.folder / RECIPE_FILE)} --resume")
            return code
        finally:
            self._stop("")
            signal.signal(signal.SIGTERM, before)
        results = self._results()
        self._blame()
        self._look_once_more()
        seconds = time.monotonic() - self.began
        fine = summarise(self.recipe, self.folder, self.reader.rounds, results, seconds=seconds)
        return code if fine else code or 1

    def _look_once_more(self) -> None:
        with contextlib.suppress(ReplicationError):  # what follows is then of what was seen
            self.reader.refresh()
        self.rounds.update(self.reader, at_end=True)

    @property
    def _impatience(self) -> str:
        return "don't wait for it" if self._remote else "kill"

    def _watch(self, screen: Screen) -> int:
        allowed = allowed_failures(self.recipe)
        due, pause = 0.0, _LOOK_SECONDS
        if self._remote:  # a service is asked no more often than it likes, the store as often as people look
            pause = min(_LOOK_SECONDS_ELSEWHERE, self.executor.poll_seconds)
        while True:
            if time.monotonic() >= due:
                self.handles = self.executor.poll(self.handles)
                due = time.monotonic() + (self.executor.poll_seconds if self._remote else 0.0)
            self._tell_restarts(screen)
            screen.show(view := self._view())
            self._tell_start(screen, view)
            failed = [h.replica_id for h in self.handles if h.ended and h.state != "completed"]
            if len(failed) > allowed:
                screen.say(f"replica {failed[0]} has failed; the others can't go on without it and are stopped")
                return 1
            if all(handle.ended for handle in self.handles):
                return 1 if failed else 0
            self.executor.wait(self.handles, pause)

    def _tell_restarts(self, screen: Screen) -> None:
        for handle in self.handles:
            if handle.restarts > self._told.get(handle.replica_id, 0):
                self._told[handle.replica_id] = handle.restarts
                why = describe(handle.exit_code) if handle.exit_code is not None else handle.reason or "it ended"
                # A service's own starts of a job are on no budget of ours.
                ours = handle.restarts == handle.preemptions + handle.errors
                allowed = f" of {_budgets(self.executor, handle.replica_id).all}" if ours else ""
                screen.say(f"replica {handle.replica_id}: {why}; restart {handle.restarts}{allowed}")

    def _tell_start(self, screen: Screen, view: FleetView) -> None:
        """Before the first round closes: how long who has been starting, and how far it has come."""
        seconds = time.monotonic() - self.began
        own = {handle.replica_id: handle for handle in self.handles}
        starting = [row.replica for row in view.rows if row.state in ("starting", "not seen") and row.replica in own]
        if view.round or not starting or seconds < self._tell_start_after:
            return
        self._tell_start_after = 2 * seconds
        who = f"replica {starting[0]} is" if len(starting) == 1 else f"{len(starting)} replicas are"
        text = f"after {duration(seconds)} {who} starting: imports, the model and the data come before the first step"
        if own[starting[0]].backend == "local":
            last = [line.strip() for line in self._last_lines(own[starting[0]]) if line.strip()]
            text += f" (replica {starting[0]}'s log: {last[-1] if last else 'nothing yet'})"
        screen.say(text)

    def _view(self) -> FleetView:
        title = self.recipe.name
        try:
            self.reader.refresh()
            self.rounds.update(self.reader)
            self._seen = self.reader.view(title)
        except ReplicationError as error:  # the replicas try again by themselves; so does the next look
            title = f"{title}: the store doesn't answer ({error})"
        view = replace(self._seen, title=title)
        known = {row.replica: row for row in view.rows}
        rows: list[Row] = []
        for handle in self.handles:
            row = known.get(handle.replica_id, Row(replica=handle.replica_id, state="starting"))
            if handle.state != "running":
                row = replace(row, state="restarting" if handle.will_retry else handle.state)
            if handle.restarts:
                row = replace(row, note=f"restart {handle.restarts}")
            elif handle.reason and handle.state in ("pending", "running"):
                row = replace(row, note=handle.reason)
            rows.append(row)
        own = {handle.replica_id for handle in self.handles}
        rows += [row for row in view.rows if row.replica not in own]  # started elsewhere, they have joined
        return replace(view, rows=rows, steps=self.recipe.training.steps)

    def _stop(self, words: str) -> None:
        """Stop what still runs, and wait for it. Asked again meanwhile: kill what runs here, and wait no more."""
        try:
            self.handles = self.executor.poll(self.handles)
            if all(handle.ended for handle in self.handles):
                return
            if words:
                print(words, flush=True)
            self._cancel()
            self._let_end()
        except (KeyboardInterrupt, _Stop):
            for local in self._local:
                local.grace_seconds = 0.0
            self._cancel()
            self.handles = self.executor.poll(self.handles)

    def _attached(self) -> list[ReplicaHandle]:
        attach = getattr(self.executor, "attach", None)  # processes of this machine end with this one
        try:
            return attach(self.recipe.store.uri) if attach is not None else []
        except ReplicationError as error:
            print(f"which jobs were sent can't be found out: {error}", file=sys.stderr)
            return []

    def _cancel(self) -> None:
        try:
            self.executor.cancel(self.handles)
        except ReplicationError as error:
            uri = self.recipe.store.uri
            print(f"{error}\nTry again with: composer-replication cancel {uri}", file=sys.stderr, flush=True)

    def _let_end(self) -> None:
        """A process of this machine has ended already; of the others this waits for the service's word."""
        if not self._remote:
            return
        deadline = time.monotonic() + self.recipe.executor.grace_seconds + _ENDING_SECONDS
        while time.monotonic() < deadline:
            self.handles = self.executor.poll(self.handles)
            if all(handle.ended for handle in self.handles):
                return
            self.executor.wait(self.handles, min(_LOOK_SECONDS_ELSEWHERE, self.executor.poll_seconds))
        late = ", ".join(f"replica {h.replica_id} on {h.backend}" for h in self.handles if not h.ended)
        print(f"not seen to end: {late}; composer-replication status {self.recipe.store.uri} --jobs tells", flush=True)

    def _results(self) -> list[ReplicaResult]:
        try:
            return self.executor.collect(self.handles, timeout=10.0)
        except CollectTimeout:
            self.handles = self.executor.poll(self.handles)
            ended = [handle for handle in self.handles if handle.ended]
            others = [ReplicaResult(h.replica_id, "not ended", None, {}) for h in self.handles if not h.ended]
            return [*self.executor.collect(ended, timeout=10.0), *others]

    def _blame(self) -> None:
        """The last words of the replicas that failed by themselves."""
        self.handles = self.executor.poll(self.handles)
        for handle in self.handles:
            if handle.state == "failed":
                why = describe(handle.exit_code) if handle.exit_code is not None else handle.reason
                place = f" ({handle.log_url})" if handle.log_url else ""
                words = f"replica {handle.replica_id} failed: {why or 'it could not be started'}."
                print(f"\n{words} The end of its log{place}:" if handle.job_id else f"\n{words}", file=sys.stderr)
                for line in self._last_lines(handle) if handle.job_id else []:
                    print(f"  | {line}", file=sys.stderr)

    def _last_lines(self, handle: ReplicaHandle) -> list[str]:
        try:
            return self.executor.last_lines(handle, 15)
        except (OSError, ReplicationError) as error:
            return [f"(not to be had: {error})"]


def _budgets(executor: Any, replica: int) -> Budgets:
    own: Any = executor.executor_of(replica) if isinstance(executor, MixedExecutor) else executor
    return own.budgets  # each back end that a recipe can name has some


def _processes(executor: BaseExecutor) -> list[LocalProcessExecutor]:
    """The executors whose replicas are processes of this machine."""
    all_of_them = [one for one, _ in executor.groups] if isinstance(executor, MixedExecutor) else [executor]
    return [one for one in all_of_them if isinstance(one, LocalProcessExecutor)]
