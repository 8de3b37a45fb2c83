"""What is refused, with which words, before the first step; and how tokens are counted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

import torch
from composer.core import DataSpec

from composer_replication.adapter.options import Options
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.composer import AutoLoCo, replica_sampler
from composer_replication.composer.data import unsharded_reason
from composer_replication.composer.fit import count_batch
from composer_replication.isolate import Identity
from tests.composer.helpers import Regression, algorithm, assert_same_bits, data, train, trainer, weights
from tests.lightning.helpers import Numbered

WHO: dict[str, Any] = {"replica": 0, "replicas": 2}


def test_only_one_optimizer_can_be_meant(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optimizer must be 0: Composer trains with one, got 1"):
        AutoLoCo(tmp_path.as_uri(), base_horizon=10, optimizer=1, **WHO)


def test_a_world_that_spans_replicas_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However gradients would be synchronised in it: Composer reduces more than those at every step."""
    remedy = r"composer -n 4 -m composer_replication\.run SCRIPT"
    fleet = InProcessFleet(1).collectives()[0]
    model, ours = Regression(), algorithm(fleet)
    made = trainer(model, data(8), ours, max_duration="1ep", ddp_sync_strategy="forced_sync")
    before = weights(model)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=remedy):
        AutoLoCo(tmp_path.as_uri(), base_horizon=10, **WHO)
    with pytest.raises(ValueError, match=remedy):
        made.fit()  # the environment changed after the Trainer was made
    monkeypatch.delenv("WORLD_SIZE")
    assert_same_bits(before, weights(model))
    assert list(tmp_path.iterdir()) == []
    made.close()


def test_a_model_that_is_wrapped_in_ddp_is_refused(tmp_path: Path) -> None:
    made = trainer(Regression(), data(8), algorithm(InProcessFleet(1).collectives()[0]), max_duration="1ep")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        made.state.model = torch.nn.parallel.DistributedDataParallel(made.state.model)  # type: ignore[assignment]
        with pytest.raises(ValueError, match="wrapped in DistributedDataParallel.*leave the wrapping out"):
            made.fit()
    finally:
        torch.distributed.destroy_process_group()
    made.close()


def test_an_algorithm_given_as_a_callback_is_refused() -> None:
    ours: Any = algorithm(InProcessFleet(1).collectives()[0])
    with pytest.raises(TypeError, match=r"algorithms=\[AutoLoCo\(\.\.\.\)\], or use callbacks=\[AutoLoCoCallback"):
        trainer(Regression(), data(8), callbacks=[ours], max_duration="1ep")


def test_a_folder_that_replicas_would_share_is_pointed_out(tmp_path: Path) -> None:
    root = tmp_path / "of" / "the" / "run"  # the last three names are looked at: not those that pytest gave

    def build(folder: str, run_name: str) -> None:
        ours = algorithm(InProcessFleet(2).collectives()[1])
        trainer(
            Regression(), data(8), ours, max_duration="1ep", save_folder=str(root / folder), run_name=run_name
        ).close()

    with pytest.warns(UserWarning, match=r"doesn't name the replica.*\{run_name\}.*-replica1"):
        build("checkpoints", "job-replica1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build("{run_name}/checkpoints", "job-replica1")


def test_loaders_that_forget_the_fleet() -> None:
    one = Identity(replica=1, replicas=2)
    both = data(8, 1, 2)
    assert unsharded_reason(both, one) is None
    reason = unsharded_reason(data(8), one)
    assert reason is not None and "rank 0 of 1, but this is" in reason and "replica_sampler" in reason
    assert unsharded_reason(data(8), Identity(replica=0, replicas=1)) is None
    assert list(replica_sampler(Numbered(8), **WHO)) == [0, 2, 4, 6]
    assert list(both.sampler) == [1, 3, 5, 7]


# -- tokens ----------------------------------------------------------------------------------------------------------


def options(**given: Any) -> Options:
    return AutoLoCo(collective=InProcessFleet(1).collectives()[0], base_horizon=10, **given)._options


def test_tokens_of_a_batch() -> None:
    ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    # A DataSpec that left padding out is believed; one that just multiplied isn't, where the batch itself tells more.
    assert count_batch({"input_ids": ids, "attention_mask": mask}, 3, options()) == 3
    assert int(count_batch({"input_ids": ids, "attention_mask": mask}, 6, options())) == 4
    assert int(count_batch({"input_ids": ids}, 6, options(pad_token_id=0))) == 3
    assert count_batch({"input_ids": ids}, 6, options()) == 6
    assert count_batch((ids, ids), 6, options()) == 6
    assert count_batch((ids, ids), 0, options()) is None
    assert count_batch((ids, ids), 6, options(token_fn=lambda batch: 11)) == 11


def test_the_data_spec_s_tokens_reach_the_round() -> None:
    ours = algorithm(InProcessFleet(1).collectives()[0], base_horizon=2)
    spec = DataSpec(data(8, batch_size=2), get_num_tokens_in_batch=lambda batch: 7)
    train(Regression(), spec, ours, max_duration="1ep")
    assert [summary.tokens for summary in ours.rounds] == [14, 14]
