"""The all-reduce over a store, and what the manager does besides."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.diloco.serverless import MockManager, ObjectStoreAllReduce
from composer_replication.errors import RoundAborted, RoundError


def together(count, work):
    """Run `work(replica)` for all replicas at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_the_mean_comes_in_place_round_after_round(tmp_path):
    def work(replica):
        with ObjectStoreAllReduce(replica, 3, tmp_path.as_uri(), poll_s=0.02, timeout_s=30) as reduce:
            assert reduce.current_step == 0
            first = torch.full((2, 3), float(replica))
            done = reduce.allreduce(first)
            assert done.wait() and torch.equal(done.get_future().wait(), first)
            second = torch.arange(4.0) * (replica + 1)
            reduce.start_quorum()
            reduce.allreduce(second)
            assert reduce.should_commit() and reduce.current_step == 2
            assert reduce.current_step() == 1, "torchft's way of asking: commits"
            return first, second

    for first, second in together(3, work):
        assert torch.equal(first, torch.full((2, 3), 1.0))
        assert torch.equal(second, torch.arange(4.0) * 2)


def test_any_shape_strides_and_floating_dtype(tmp_path):
    def tensors(replica):
        torch.manual_seed(7)
        return [
            torch.randn(()) * (replica + 1),
            torch.randn(3, 4).t() * (replica + 1),
            torch.randn(8, 6)[::2, 1::2] * (replica + 1),
            torch.randn(5, dtype=torch.float64) * (replica + 1),
            torch.randn(5, 2).to(torch.bfloat16) * (replica + 1),
            torch.randn(3).to(torch.float16) * (replica + 1),
            torch.randn(3, dtype=torch.complex64) * (replica + 1),
            torch.empty(0, 3),
            nn.Parameter(torch.randn(2) * (replica + 1)),
            torch.randn(10_000) * 10.0 ** (-6 * replica),  # no outliers here: every tensor counts
        ]

    made = [tensors(0), tensors(1)]  # here, for threads share one random-number generator

    def work(replica):
        with ObjectStoreAllReduce(replica, 2, str(tmp_path), poll_s=0.02, timeout_s=30) as reduce:
            mine = made[replica]
            kept = [(t.dtype, t.shape, t.stride()) for t in mine]
            for tensor in mine:
                reduce.allreduce(tensor)
            assert [(t.dtype, t.shape, t.stride()) for t in mine] == kept
            return mine

    first, second = together(2, work)
    for a, b, x, y in zip(first, second, tensors(0), tensors(1), strict=True):
        assert torch.equal(a, b)
        # Values travel as float32 and come back in the tensor's own dtype: one rounding to each.
        rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(a.dtype, 2**-22)
        torch.testing.assert_close(a.detach(), ((x + y) / 2).detach(), rtol=rtol, atol=1e-7)


def test_what_cannot_be_averaged_is_refused_before_a_round(tmp_path):
    reduce = ObjectStoreAllReduce(0, 2, tmp_path.as_uri(), timeout_s=1)
    with pytest.raises(ValueError, match="int64"):
        reduce.allreduce(torch.arange(3))
    with pytest.raises(ValueError, match="dense"):
        reduce.allreduce(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="poll_s"):
        ObjectStoreAllReduce(0, 2, tmp_path.as_uri(), poll_s=0)
    with pytest.raises(ValueError, match="replica"):
        ObjectStoreAllReduce(2, 2, tmp_path.as_uri())
    with pytest.raises(ValueError, match="anon"):
        ObjectStoreAllReduce(0, 2, tmp_path.as_uri(), {"anon": True})


def test_a_replica_without_a_finite_tensor_is_not_averaged_and_all_agree(tmp_path):
    def work(replica):
        with ObjectStoreAllReduce(replica, 2, tmp_path.as_uri(), poll_s=0.02, timeout_s=30) as reduce:
            one = torch.tensor([3.0 if replica == 0 else float("nan")])
            reduce.allreduce(one)
            fine = reduce.should_commit()
            nobody = torch.tensor([float("inf")])
            reduce.allreduce(nobody)
            return one.item(), fine, nobody.item(), reduce.should_commit()

    assert together(2, work) == [(3.0, True, float("inf"), False)] * 2


def test_a_missing_replica_ends_strict_rounds_with_its_name(tmp_path):
    def work(replica):
        with ObjectStoreAllReduce(replica, 3, tmp_path.as_uri(), poll_s=0.02, timeout_s=0.5) as reduce:
            reduce.allreduce(torch.ones(2))  # the beginning waits longer than a round
            if replica == 2:
                return None
            with pytest.raises(RoundAborted, match="replica 2"):
                reduce.allreduce(torch.ones(2))

    together(3, work)


@pytest.mark.processes
def test_processes_that_share_a_folder(tmp_path):
    program = (
        "import sys, torch\n"
        "from composer_replication.diloco.serverless import ObjectStoreAllReduce\n"
        "t = torch.arange(6.0).view(2, 3) * (int(sys.argv[1]) + 1)\n"
        "with ObjectStoreAllReduce(int(sys.argv[1]), 2, sys.argv[2], poll_s=0.05) as reduce:\n"
        "    reduce.allreduce(t)\n"
        "print(t.tolist())"
    )
    command = [sys.executable, "-c", program]
    started = [
        subprocess.Popen([*command, str(i), tmp_path.as_uri()], stdout=subprocess.PIPE, text=True) for i in (0, 1)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == [
        "[[0.0, 1.5, 3.0], [4.5, 6.0, 7.5]]"
    ] * 2


def test_a_manager_counts_commits_and_keeps_registered_state():
    (collective,) = InProcessFleet(1).collectives()
    manager = MockManager(collective)
    kept = {"a": 1}
    manager.register_state_dict_fn("mine", kept.update, lambda: dict(kept))
    with pytest.raises(ValueError, match="mine"):
        manager.register_state_dict_fn("mine", kept.update, lambda: dict(kept))
    manager.start_quorum()
    manager.allreduce(torch.ones(2))
    manager.allreduce(torch.ones(2)).wait()
    assert manager.current_step() == 0 and manager.should_commit() and manager.current_step() == 1
    assert (manager.num_participants(), manager.participating_rank(), manager.batches_committed()) == (1, 0, 1)
    state, user = manager.state_dict(), manager.user_state_dict()
    kept["a"] = 2
    manager.load_user_state_dict(user)
    assert kept == {"a": 1}
    manager.start_quorum()
    manager.allreduce(torch.tensor([float("nan")]))
    assert not manager.should_commit() and manager.current_step() == 1
    manager.start_quorum()
    manager.report_error(RuntimeError("mine alone"))
    with pytest.raises(RoundError):
        manager.should_commit()
    with pytest.raises(RoundError, match="before the first"):
        manager.load_state_dict(state)
    with pytest.raises(ValueError, match="reduce_op"):
        manager.allreduce(torch.ones(2), reduce_op=torch.distributed.ReduceOp.SUM)
    manager.shutdown()
    manager.shutdown()
    later = MockManager(InProcessFleet(1).collectives()[0])
    later.load_state_dict(state)
    assert later.current_step() == 1 and later.state_dict() == state == {"step": 1, "batches_committed": 1, "round": 1}
    later.shutdown()
