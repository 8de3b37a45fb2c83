"""The outer loop: train alone for an interval, average, take one outer step, plan the next interval.

Invariant: `OuterLoop` is the one owner of anchor, momentum and controller state, and changes them only from values
that the round agreed on. Every replica that applied the same rounds therefore holds the same bits.

A hand-written training loop needs few lines more; examples/plain_loop.py is a whole one, marked where.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from composer_replication.autoloco.config import OuterConfig
from composer_replication.autoloco.outer import outer_coefficients
from composer_replication.autoloco.values import Plan, Policy, Preview
from composer_replication.collective.agreement import differing_settings
from composer_replication.collective.base import Collective, Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS, Layout
from composer_replication.diloco.chunks import apply_means, chunk_reader, interval_square_norm
from composer_replication.diloco.held import Held
from composer_replication.diloco.loop_state import STATE_VERSION, Totals, check_state
from composer_replication.diloco.observed import observe, steps_of
from composer_replication.diloco.summary import FinalSummary, RoundSummary, StartSummary
from composer_replication.diloco.summing_up import sum_up
from composer_replication.diloco.tensors import SharedTensors
from composer_replication.diloco.told import TIMES, IntervalClock, told_of
from composer_replication.errors import Diverged, FleetMismatch, RoundError

__all__ = ["OuterLoop"]

_MOST_EMPTY_ROUNDS = 3  # in a row, before the run is given up
_DEFAULT_OUTER = OuterConfig()


class OuterLoop:
    """Drives one replica's side of the rounds.

    Args:
        model: a module (its trainable parameters and persistent float buffers are shared) or named tensors.
        collective: who carries the tensors; owned by the caller, closed by `close`.
        policy: chooses the interval's length.
        outer: outer optimizer settings.
        outer_device: where anchor and momentum live: "cpu", "model" (beside each tensor), or a device.
        buffers: "average" moves persistent float buffers (BatchNorm statistics) to their mean each round;
            "local" leaves them to each replica.
        weighting: "equal", or "tokens": a replica's share in the mean is its share of the interval's tokens.
        settings: further plain values that must be equal on all replicas.
        tell_times: whether this replica's reports say how long it trained and waited; not where it is simulated.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        collective: Collective,
        *,
        policy: Policy,
        outer: OuterConfig = _DEFAULT_OUTER,
        outer_device: str | torch.device = "cpu",
        buffers: Literal["average", "local"] = "average",
        weighting: Literal["equal", "tokens"] = "equal",
        settings: Mapping[str, Any] | None = None,
        chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
        clock: Callable[[], float] = time.monotonic,
        tell_times: bool = True,
    ) -> None:
        if buffers not in ("average", "local"):
            raise ValueError(f"buffers must be 'average' or 'local', got {buffers!r}")
        if weighting not in ("equal", "tokens"):
            raise ValueError(f"weighting must be 'equal' or 'tokens', got {weighting!r}")
        self._collective = collective
        self._policy = policy
        self._outer = outer.resolved(policy.name)
        self._momentum = self._outer.momentum or 0.0
        self._weighting = weighting
        self._clock = clock
        self._interval_clock = IntervalClock(clock)
        self._hidden: frozenset[str] = frozenset() if tell_times else TIMES
        self._tensors = SharedTensors(
            model,
            device=outer_device,
            average_buffers=buffers == "average",
            chunk_elements=chunk_elements,
            hold=self._hold,
        )
        self._settings: dict[str, Any] = {
            **(settings or {}),
            "policy": policy.settings(),
            "outer": dataclasses.asdict(self._outer),
            "buffers": buffers,
            "weighting": weighting,
        }
        self._loaded: dict[str, Any] | None = None
        self._policy_state: Any = None
        self._plan: Plan | None = None
        self.round = 0
        self.position = 0
        self.steps = 0
        self._empty_rounds = 0  # in a row, up to now: nobody could be averaged
        self._tokens: int | None = 0
        self._mass = 0.0
        self._digest = ""
        self.ended = False
        self.left = False
        self._totals = Totals()
        self._told: dict[str, float] = {}  # of the last round, for the next report
        self._told_last: dict[str, float] = {}  # of the last one that this replica took part in, for its result

    def _hold(self, name: str, tensor: Tensor) -> Held:
        """How this process holds a tensor of the model."""
        return Held(name, tensor)

    # -- where we are --------------------------------------------------------------------------------------------

    @property
    def replica(self) -> int:
        return self._collective.replica

    @property
    def fleet(self) -> tuple[int, ...]:
        return self._collective.fleet

    @property
    def collective(self) -> Collective:
        return self._collective

    @property
    def grid(self) -> tuple[int, ...]:
        """The step counts that a `Preview` must hold sums for."""
        return self._policy.grid

    @property
    def started(self) -> bool:
        return self._plan is not None and bool(self._digest)

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("the loop has no plan before start()")
        return self._plan

    @property
    def intervals_lost(self) -> int:
        """Of this replica: decided without it, or not finite."""
        return self._totals.intervals_lost

    @property
    def digest(self) -> str:
        """Hash of anchor, momentum and controller: equal on all replicas at equal rounds."""
        return self._digest

    @property
    def due(self) -> bool:
        """The interval has its steps: time for `close_interval`."""
        return self.started and not self.ended and not self.left and self.steps >= self.plan.steps

    @property
    def overtaken(self) -> bool:
        """The round was decided without this replica: `close_interval` now; the interval is lost."""
        return self.started and not self.ended and not self.left and self._collective.overtaken

    # -- one run -------------------------------------------------------------------------------------------------

    def start(self, preview: Preview) -> StartSummary:
        """Join the fleet; afterwards the model holds the agreed weights (or, resumed, its own) and `plan` is set.

        `preview` sums this replica's own schedule from its present position. Raises FleetMismatch, ReplicaTaken,
        StoreError, RoundTimeout; the model is untouched then.
        """
        resumed = self._loaded is not None
        if self._loaded is not None:
            self._restore_state(self._loaded)
            self._loaded = None
        else:
            self._policy_state, self._plan = self._policy.start(preview)
            self._digest = self._tensors.digest(self._state_text())
        offered = self._snapshot()
        settings = {**self._settings, "frozen": self._tensors.frozen_hashes()}
        if tied := self._tensors.tied():
            settings["tied"] = tied
        got = self._collective.start(offered, settings=settings, resumed=resumed)
        position = self.position
        if not resumed:
            self._adopt(got)
            self.ended = got.ended
            position = 0
        if got.awaited:
            self.left = False  # it had left a fleet before this one
        if not resumed or self._collective.overtaken:
            self._catch_up()
        if self.steps == 0:
            self._interval_clock.begin()
        else:  # in the middle of an interval
            self._interval_clock.go_on()
        # A resumed replica has trained all that it had behind it; whatever the fleet did beyond is forwarded.
        return StartSummary(
            round=self.round, position=self.position, resumed=resumed, fast_forward=self.position - position
        )

    def watch(self) -> bool:
        """After each batch: whether another process of this replica was asked to stop. There is none."""
        return False

    def before_step(self) -> None:
        """Call before each inner optimizer step: takes up tensors that have been unfrozen."""
        self._tensors.notice_trainable()

    def step_done(self, lr: float, tokens: int | None = None) -> None:
        """Count one inner optimizer step that changed the weights.

        Args:
            lr: the learning rate of that step.
            tokens: non-padding input tokens of that step; None if they aren't counted.

        Raises:
            ValueError: `lr` isn't a finite number of at least 0, or `tokens` not a whole one.
        """
        if not (lr >= 0.0 and math.isfinite(lr)):
            raise ValueError(f"lr must be a finite number of at least 0, got {lr!r}")
        self.steps += 1
        self._mass += float(lr)
        self.add_tokens(tokens)

    def add_tokens(self, tokens: int | None) -> None:
        """Add to the interval's token count; None marks the whole interval as not counted."""
        if tokens is not None and (not isinstance(tokens, int) or tokens < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"tokens must be a whole number of at least 0, or None, got {tokens!r}")
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens

    def close_interval(
        self, preview: Preview, *, leaving: bool = False, metrics: Mapping[str, float] | None = None
    ) -> RoundSummary:
        """Contribute the interval, wait for the round, apply its outcome, plan the next interval.

        `preview` sums this replica's schedule from the next step on; a replica with nothing left in its budget
        leaves with this round. Raises RoundAborted, RoundTimeout, Diverged, Fenced, Interrupted, StoreError; the
        model then still holds this replica's own weights. Raises RoundError when nobody could be averaged for the third
        time in a row.
        """
        began = self._clock()
        self._interval_clock.end()
        layout = self._tensors.interval_layout()
        leaving = leaving or preview.remaining == 0
        report = self._report(layout, preview, leaving, metrics or {})
        measured = self._clock() - began
        contribution = Contribution(self.round, report, layout, chunk_reader(self._tensors, layout))
        outcome = self._collective.average(contribution)
        counted = next((r for r in (*outcome.members, *outcome.others) if r.replica == self.replica), None)
        summary = self._apply(outcome, layout, report, own_steps=self.steps, began=began)
        summary = dataclasses.replace(summary, phase_seconds={"norm": measured, **summary.phase_seconds})
        if counted is not None:
            self.left = counted.leaving  # it may be what an earlier life has said, and that binds
        elif not self.ended:
            summary = dataclasses.replace(summary, fast_forward=summary.fast_forward + self._catch_up())
        self._interval_clock.begin()
        return dataclasses.replace(summary, next_plan=self.plan, ended=self.ended)

    def finish(self, preview: Preview, *, metrics: Mapping[str, float] | None = None) -> FinalSummary:
        """Put in what is left of the interval, leave, and follow the others to the end of the run.

        Afterwards the model holds the fleet's final weights. Harmless when called again.
        """
        while not self.left and not self.ended:
            self.close_interval(preview, leaving=True, metrics=metrics)
        while not self.ended:
            layout = self._tensors.interval_layout()
            outcome = self._collective.follow(self.round, layout, self._digest, wait=True)
            assert outcome is not None, "follow(wait=True) gives an outcome or raises"
            self._apply(outcome, layout, None, own_steps=0, began=self._clock())
        self._tensors.restore()
        final = FinalSummary(
            rounds=self.round,
            position=self.position,
            digest=self._digest,
            **dataclasses.asdict(self._totals),
        )
        result = {**dataclasses.asdict(final), "metrics": dict(metrics or {}), "last": self._shown(self._told_last)}
        self._collective.finish(self._digest, result)
        return final

    def shared_weights(self) -> AbstractContextManager[None]:
        """The model holds the anchor inside the block, and its own weights again after it."""
        return self._tensors.swapped_in()

    def close(self) -> None:
        """Stop heartbeats and let go of the collective's handles."""
        self._collective.close()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed replica needs beside the trainer's own state: tensors and primitives only."""
        layout = self._tensors.layout()
        return {
            "version": STATE_VERSION,
            "replica": self.replica,
            "settings": self._settings_text(),
            "layout": layout.to_json(),
            "anchor": dict(zip((s.name for s in layout.slots), self._tensors.anchors(), strict=True)),
            "momentum": dict(zip((s.name for s in layout.slots), self._tensors.momenta(), strict=True)),
            "shared": self._state_text(),
            "digest": self._digest,
            "trained": [slot.name for slot in self._tensors.interval_layout().slots],
            "interval": {
                "steps": self.steps,
                "tokens": self._tokens,
                "mass": self._mass,
                "seconds": self._interval_clock.seconds,
                "told": dict(self._told),
            },
            "totals": dataclasses.asdict(self._totals),
            "left": self.left,
            "ended": self.ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`; takes effect in `start`. Raises KeyError or FleetMismatch at once if it can't."""
        check_state(state, self.replica)
        self._loaded = dict(state)

    def _settings_text(self) -> str:
        """What the run is trained by, as JSON: a resumed one goes on by the same."""
        return json.dumps(self._settings, sort_keys=True)

    def _restore_state(self, state: Mapping[str, Any]) -> None:
        if lines := differing_settings(json.loads(state["settings"]), json.loads(self._settings_text())):
            raise FleetMismatch(
                f"replica {self.replica} can't resume with other settings than its checkpoint's (there): "
                f"{'; '.join(lines[:8])}"
            )
        layout = Layout.from_json(state["layout"])
        names = [slot.name for slot in layout.slots]
        self._tensors.adopt(
            layout, [state["anchor"][n] for n in names], [state["momentum"][n] for n in names], restore=False
        )
        self._tensors.mark_trained(state["trained"])
        self._load_text(state["shared"])
        self._digest = self._tensors.digest(state["shared"])
        if self._digest != state["digest"]:
            raise Diverged(f"replica {self.replica}: the checkpoint's outer state doesn't match its own digest")
        interval = state["interval"]
        self.steps, self._tokens, self._mass = interval["steps"], interval["tokens"], interval["mass"]
        self._interval_clock.end(interval.get("seconds", 0.0))  # older checkpoints have neither
        self._told = dict(interval.get("told", {}))
        self._told_last = {"round": self.round - 1.0, **self._told} if self._told else {}
        self._totals = Totals(**state["totals"])
        self.left, self.ended = state["left"], state["ended"]

    def _state_text(self) -> str:
        """The agreed state that isn't a tensor, as canonical JSON (floats round-trip exactly)."""
        return json.dumps(
            {
                "version": STATE_VERSION,
                "round": self.round,
                "position": self.position,
                "empty_rounds": self._empty_rounds,
                "policy": self._policy_state.to_dict(),
                "plan": dataclasses.asdict(self.plan),
            },
            sort_keys=True,
        )

    def _load_text(self, text: str) -> None:
        state = json.loads(text)
        self.round, self.position, self._empty_rounds = state["round"], state["position"], state["empty_rounds"]
        self._policy_state = self._policy.state_from_dict(state["policy"])
        self._plan = Plan(**state["plan"])

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            round=self.round,
            layout=self._tensors.layout(),
            anchor=self._tensors.anchors(),
            momentum=self._tensors.momenta() if self.round else (),
            state={"text": self._state_text()},
            digest=self._digest,
        )

    def _adopt(self, got: Snapshot) -> None:
        self._tensors.adopt(got.layout, got.anchor, got.momentum, restore=True)
        self._tensors.begin_interval()
        self._load_text(got.state["text"])
        self._digest = self._tensors.digest(got.state["text"])
        if self._digest != got.digest:
            raise Diverged(f"replica {self.replica}: the state of round {got.round} doesn't match its digest")

    # -- one round -----------------------------------------------------------------------------------------------

    def _report(self, layout: Layout, preview: Preview, leaving: bool, metrics: Mapping[str, float]) -> Report:
        square_norm = interval_square_norm(self._tensors, layout)
        if self._weighting == "tokens":
            if self._tokens is None:
                raise ValueError(
                    "weighting='tokens' needs a token count, and this interval's batches had none: give a token "
                    "function, or use weighting='equal'"
                )
            weight = float(self._tokens)
        else:
            # A replica that leaves in the middle of an interval counts for the part that it trained.
            weight = min(self.steps / self.plan.steps, 1.0) if self.plan.steps else 1.0
        told = self._shown({**self._told, "train_seconds": self._interval_clock.seconds})
        return Report(
            replica=self.replica,
            steps=self.steps,
            tokens=self._tokens,
            mass=self._mass,
            square_norm=square_norm,
            finite=not math.isnan(square_norm),
            leaving=leaving,
            next_lr=preview.next_lr,
            preview=tuple(preview.sums),
            remaining=preview.remaining,
            base=self._digest,
            layout=layout.fingerprint,
            weight=weight,
            metrics={str(name)[:100]: float(value) for name, value in (*told.items(), *metrics.items())},
        )

    def _shown(self, told: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in told.items() if name not in self._hidden}

    def _apply(
        self, outcome: RoundOutcome, layout: Layout, own: Report | None, *, own_steps: int, began: float
    ) -> RoundSummary:
        """Take the outer step of a closed round, advance the policy, begin the next interval."""
        plan = self.plan
        outer = outer_coefficients(self._outer, self._momentum, plan.mass, plan.base_mass)
        phases = dict(outcome.phase_seconds)
        stepping = self._clock()
        if outcome.members:
            apply_means(self._tensors, layout, outcome.mean, outer, average=self._outer.kind == "average")
        else:
            self._tensors.restore()
        # Decoding happens inside, and is counted by the collective as its own phase.
        decoding = outcome.phase_seconds.get("decode", 0.0) - phases.get("decode", 0.0)
        phases = {**outcome.phase_seconds, "outer_step": self._clock() - stepping - decoding}
        fleet_steps = steps_of(outcome.members, plan.steps)
        self.position += fleet_steps
        observation = observe(
            (*outcome.members, *outcome.others),
            outcome.members,
            drift=outcome.drift,
            mean_square_norm=outcome.mean_square_norm,
            fleet=outcome.fleet_size or len(self.fleet),
            planned=plan.steps,
            cut=plan.truncated,
            position=self.position,
            grid=self.grid,
        )
        self.round += 1
        self._empty_rounds = 0 if outcome.members else self._empty_rounds + 1
        if observation is not None:
            self._policy_state, self._plan = self._policy.advance(self._policy_state, observation)
        self.ended = not outcome.expected_next
        if own is not None and own_steps and not any(r.replica == self.replica for r in outcome.members):
            self._totals.intervals_lost += 1
        self.steps, self._tokens, self._mass = 0, 0, 0.0
        self._tensors.begin_interval()
        hashing = self._clock()
        self._digest = self._tensors.digest(self._state_text())
        phases["digest"] = self._clock() - hashing
        self._totals.add(outcome)
        saving = self._clock()
        self._collective.applied(self._snapshot)
        if self._empty_rounds >= _MOST_EMPTY_ROUNDS:
            reasons = "; ".join(f"replica {replica}: {why}" for replica, why in outcome.absent.items())
            raise RoundError(
                f"nobody could be averaged in the last {self._empty_rounds} rounds (up to round {outcome.round}): "
                f"{reasons}. Training has diverged: start again from an earlier checkpoint, with a lower learning rate "
                "or with gradients clipped"
            )
        phases["checkpoint"] = self._clock() - saving
        summary = sum_up(
            outcome,
            own,
            replica=self.replica,
            plan=plan,
            next_plan=self.plan,
            outer=outer,
            observation=observation,
            position=self.position,
            fast_forward=max(fleet_steps - own_steps, 0),
            ended=self.ended,
            exchange_seconds=self._clock() - began,
            phase_seconds=phases,
        )
        self._told = told_of(summary)
        if own is not None:
            self._told_last = {"round": float(outcome.round), **self._told}
        return summary

    def _catch_up(self) -> int:
        """Apply every round that was decided already; the inner steps of the fleet that went by."""
        before = self.position
        while not self.ended:
            layout = self._tensors.interval_layout()
            outcome = self._collective.follow(self.round, layout, self._digest, wait=False)
            if outcome is None:
                break
            self._apply(outcome, layout, None, own_steps=0, began=self._clock())
            self._tensors.restore()
        return self.position - before
