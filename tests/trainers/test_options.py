"""What is refused, with which words, before the first step: the same for both trainers' adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_replication.isolate import Identity
from tests.trainers.harness import Core, Kind, Share, assert_same_bits, weights

WHO: dict[str, Any] = {"replica": 0, "replicas": 2}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "base_horizon is missing"),
    ({"base_horizon": 0}, "base_horizon must be .* not 0"),
    ({"base_horizon": 10, "min_horizon": 20}, "min_horizon must be at most base_horizon"),
    ({"base_horizon": 10, "outer_lr": 0.0}, "lr must be"),
    ({"base_horizon": 10, "outer_momentum": 1.0}, "momentum must be"),
    ({"base_horizon": 10, "policy": "autolocco"}, "did you mean 'autoloco'"),
    ({"base_horizon": 10, "groth_cap": 1.1}, "there is no option 'groth_cap'; did you mean 'growth_cap'"),
    ({"base_horizon": 10, "codec": "int7"}, "int7"),
    ({"base_horizon": 10, "weighting": "token"}, "weighting must be 'equal' or 'tokens', got 'token'"),
    ({"base_horizon": 10, "buffers": "sum"}, "buffers must be 'average' or 'local'"),
    ({"base_horizon": 10, "validate_with": "both"}, "validate_with must be 'local' or 'shared'"),
    ({"base_horizon": 10, "replica_failure_policy": "ignore"}, "replica_failure_policy must be 'strict' or 'skip'"),
    ({"base_horizon": 10, "timeout": 0}, "timeout must be a positive number of seconds, got 0"),
    ({"base_horizon": 10, "timeout": "5"}, "timeout must be a positive number of seconds, got '5'"),
    ({"base_horizon": 10, "start_timeout": 0}, "start_timeout must be a positive number of seconds, got 0"),
    ({"base_horizon": 10, "start_timeout": "5"}, "start_timeout must be a positive number of seconds, got '5'"),
    ({"base_horizon": 10, "replica": "0"}, "replica must be a whole number, got '0'"),
    ({"base_horizon": 10, "replicas": 2.0}, "replicas must be a whole number, got 2.0"),
    ({"base_horizon": 10, "min_replicas": "1"}, "min_replicas must be a whole number, got '1'"),
    ({"base_horizon": 10, "checkpoint_every": "1"}, "checkpoint_every must be a whole number, got '1'"),
    ({"base_horizon": 10, "checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
    ({"base_horizon": 10, "checkpoint_every_rounds": 1.5}, "checkpoint_every_rounds must be a whole number, got 1"),
    ({"base_horizon": 10, "run": 3}, "run must be a name, got 3"),
    ({"base_horizon": "10"}, "base_horizon must be .*'10'"),
    ({"base_horizon": 10, "outer_lr": "0.7"}, "lr must be .*'0.7'"),
    ({"base_horizon": 10, "min_replicas": 3}, "min_replicas must be between 1 and 2, got 3"),
    ({"base_horizon": 10, "checkpoint_every_rounds": 0}, "checkpoint_every_rounds must be at least 1"),
    (
        {"base_horizon": 10, "checkpoint_dir": "here", "checkpoint_every_rounds": 20},
        "checkpoint_every_rounds=20 doesn't go with checkpoint_every=10.*such as 20",
    ),
    ({"base_horizon": 10, "replica": 2}, "replica must be between 0 and 1 in a fleet of 2, got 2"),
    ({"base_horizon": 10, "replica": -1}, "replica must be between 0 and 1 in a fleet of 2, got -1"),
    ({"base_horizon": 10, "replicas": 0}, "replicas must be at least 1, got 0"),
    ({"base_horizon": 10, "policy": "qsr"}, "alpha"),
    ({"base_horizon": 10, "optimizer": -1}, "optimizer must be .*, got -1"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused_at_construction(
    kind: Kind, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for adapter in kind.adapters:
        with pytest.raises(ValueError, match=message):
            adapter(tmp_path.as_uri(), **{**WHO, **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("store", "message"),
    [(" ", "no store"), (5, "store must be a URI or an open store, got 5"), ("a\0b", "store holds a NUL byte")],
)
def test_a_store_that_can_not_be_is_refused_at_construction(kind: Kind, store: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.adapter(store, **WHO, base_horizon=10)


def test_every_field_can_be_given_by_its_name_and_building_touches_nothing(kind: Kind, tmp_path: Path) -> None:
    more = {"growth_cap": 1.3, "momentum_max": 0.9, "max_scale": None, "warmup_steps": 7}
    ours = kind.adapter((tmp_path / "run").as_uri(), **WHO, base_horizon=100, **more)
    assert ours.policy.settings()["growth_cap"] == 1.3
    assert ours.policy.settings()["warmup_steps"] == 7
    assert (ours.outer.momentum_max, ours.outer.max_scale) == (0.9, None)
    assert list(tmp_path.iterdir()) == []


def test_the_place_in_the_fleet_comes_from_the_environment(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="COMPOSER_REPLICATION_REPLICA and COMPOSER_REPLICATION_REPLICAS"):
        kind.adapter(tmp_path.as_uri(), base_horizon=10)
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICA", "3")
    with pytest.raises(ValueError, match=r"\(replicas missing\)"):
        kind.adapter(tmp_path.as_uri(), base_horizon=10)
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICAS", "4")
    with pytest.raises(ValueError, match="no store.*COMPOSER_REPLICATION_STORE"):
        kind.adapter(base_horizon=10)
    monkeypatch.setenv("COMPOSER_REPLICATION_STORE", tmp_path.as_uri())
    assert kind.adapter(base_horizon=10).identity == Identity(replica=3, replicas=4)
    assert kind.adapter(base_horizon=10, replica=3, replicas=4).identity == Identity(replica=3, replicas=4)
    # Both can't be meant.
    with pytest.raises(ValueError, match="replicas=8 contradicts COMPOSER_REPLICATION_REPLICAS=4.*leave replicas out"):
        kind.adapter(base_horizon=10, replicas=8)
    with pytest.raises(ValueError, match="replica=0 contradicts COMPOSER_REPLICATION_REPLICA=3.*leave replica out"):
        kind.adapter(base_horizon=10, replica=0)
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICA", "one")
    with pytest.raises(ValueError, match="COMPOSER_REPLICATION_REPLICA must be a whole number, got 'one'"):
        kind.adapter(base_horizon=10)


def test_a_launcher_s_variables_count_when_it_is_named(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    ours = kind.adapter("memory://", base_horizon=10, launcher="slurm-array")
    assert ours.identity == Identity(replica=1, replicas=2)


# -- what stands in the Trainer, and around it -----------------------------------------------------------------------


def refused(kind: Kind, *ours: Any, kinds: Any = ValueError, match: str, **settings: Any) -> None:
    """The fit raises this, and has trained nothing."""
    core = Core()
    before = weights(core)
    with pytest.raises(kinds, match=match):
        kind.fit(core, Share(8), *ours, **settings)
    assert core.seen == []
    assert_same_bits(before, weights(core))


def test_two_in_one_trainer_are_refused(kind: Kind) -> None:
    said = {"lightning": "more than one stateful callback", "composer": "two AutoLoCo in this Trainer: leave one out"}
    refused(kind, kind.ours(), kind.ours(), kinds=(ValueError, RuntimeError), match=said[kind.name])


def test_several_optimizers_are_refused(kind: Kind) -> None:
    def two(module: Any) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (module.core.net[0], module.core.net[2])], None

    # Composer takes one, whoever asks; under Lightning one can be named, with manual optimization.
    said = {
        "lightning": "2 optimizers|Training with multiple optimizers is only supported with manual optimization",
        "composer": "Only one optimizer is supported; found 2",
    }
    refused(
        kind, kind.ours(), kinds=(ValueError, NotImplementedError, RuntimeError), match=said[kind.name], optimize=two
    )


def test_a_default_group_that_spans_replicas_is_refused(kind: Kind) -> None:
    """However its gradients would be synchronised: both trainers reduce over the default group at every step."""
    said = {
        "lightning": "default process group of 2 processes.*don't initialise it",
        "composer": r"one of 2 in Composer's world.*composer -n 2 -m composer_replication\.run SCRIPT",
    }
    core = Core()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises((ValueError, RuntimeError), match=said[kind.name]):
            kind.fit(core, Share(8), kind.ours())
    finally:
        torch.distributed.destroy_process_group()
    assert core.seen == []


def test_a_default_group_of_one_is_harmless(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))  # as any launcher of one process does
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert kind.fit(Core(), Share(4), kind.ours()).steps == [4]
    finally:
        torch.distributed.destroy_process_group()


def test_no_process_group_is_ever_made(kind: Kind) -> None:
    kind.fit(Core(), Share(4), kind.ours())
    assert not torch.distributed.is_initialized()
