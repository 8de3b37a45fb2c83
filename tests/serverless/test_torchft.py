"""torchft's own DiLoCo and LocalSGD over our manager: what they call is there, and the bits are our own loop's."""

from __future__ import annotations

import ast
import inspect
import threading
from functools import partial

import pytest
import torch
from torch import nn

from composer_replication import FixedPolicy, InProcessFleet, ObjectStoreCollective, OuterLoop
from composer_replication.autoloco import OuterConfig, Preview
from composer_replication.diloco import make_diloco_outer_loop
from composer_replication.diloco.serverless import MockManager, ObjectStoreAllReduce, ObjectStoreManager
from composer_replication.errors import Diverged, FleetMismatch, RoundError
from tests.support.threads import run_threads

local_sgd = pytest.importorskip("torchft.local_sgd")
torchft_manager = pytest.importorskip("torchft.manager")

REPLICAS, INTERVAL, ROUNDS = 4, 3, 10


# -- conformance ------------------------------------------------------------------------------------------------------


def uses_of_manager() -> list[tuple[str, ast.Call | None]]:
    """Every attribute of a manager that torchft's local_sgd.py touches, with the call if it is one."""
    tree = ast.parse(inspect.getsource(local_sgd))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        (node.attr, calls.get(id(node)))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("manager", "self._manager")
    ]


def test_everything_that_torchft_s_local_sgd_calls_is_there() -> None:
    used = uses_of_manager()
    # If this list grows, torchft asks for more: see that it means here what it means there.
    assert {name for name, _ in used} == {
        *("_use_async_quorum", "allow_state_dict_read", "allreduce", "current_step", "disallow_state_dict_read"),
        *("register_state_dict_fn", "should_commit", "start_quorum"),
    }
    for name, call in used:
        face = getattr(ObjectStoreManager, name)
        if call is None:
            assert face is False and name == "_use_async_quorum"
            continue
        # The call fits our signature ...
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(face).bind(None, *call.args, **keywords)
        # ... and our signature takes what torchft's own does, by the same names in the same order.
        own = list(inspect.signature(getattr(torchft_manager.Manager, name)).parameters)
        assert list(inspect.signature(face).parameters)[: len(own)] == own, name


def test_what_is_returned_has_what_local_sgd_asks_of_it() -> None:
    source = ast.parse(inspect.getsource(local_sgd))
    asked = {
        node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "work"
    }
    assert asked == {"wait", "get_future"}
    manager = ObjectStoreManager(InProcessFleet(1).collectives()[0])
    work = manager.allreduce(torch.ones(2))
    assert all(callable(getattr(work, name)) for name in asked)
    manager.shutdown()


# -- the same run, three ways -----------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def models(count: int) -> list[nn.Sequential]:
    """Made one after another: threads share a random-number generator."""
    return [model() for _ in range(count)]


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    inputs = torch.randn(8, 6, generator=generator)
    optimizer.zero_grad()
    (net(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def by_our_loop(collective, net: nn.Module) -> list[torch.Tensor]:
    preview = Preview(steps=(INTERVAL,), sums=(INTERVAL * 0.01,), next_lr=0.01, remaining=None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(collective.replica)
    loop = OuterLoop(net, collective, policy=FixedPolicy(horizon=INTERVAL), outer=OuterConfig(lr=0.7, momentum=0.9))
    loop.start(preview)
    seen = []
    for step in range(1, INTERVAL * ROUNDS + 1):
        trained(net, optimizer, generator)
        loop.step_done(lr=0.01)
        if loop.due:
            loop.close_interval(preview, leaving=step == INTERVAL * ROUNDS)
            seen.append(weights(net))
    loop.finish(preview)
    loop.close()
    return seen


def by_torchft(collective, net: nn.Module, *, outer: str) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(collective.replica)
    manager = ObjectStoreManager(collective)
    if outer == "ours":
        diloco = make_diloco_outer_loop(manager, [net], optimizer, sync_every=INTERVAL)
    else:
        sgd = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = local_sgd.DiLoCo(manager, [net], optimizer, sgd, sync_every=INTERVAL)
    assert isinstance(diloco, local_sgd.DiLoCo)
    seen = []
    with diloco:
        for step in range(1, INTERVAL * ROUNDS + 1):
            trained(net, optimizer, generator)
            if step % INTERVAL == 0:
                seen.append(weights(net))
    assert manager.current_step() == ROUNDS and manager.batches_committed() == ROUNDS * REPLICAS
    manager.shutdown()
    return seen


def in_threads(script, codec: str = "float32", folder=None) -> list[list[torch.Tensor]]:
    if folder is None:
        collectives = InProcessFleet(REPLICAS, codec=codec, timeout_seconds=60).collectives()
    else:
        collectives = [
            ObjectStoreCollective(
                folder.as_uri(), replica=i, replicas=REPLICAS, codec=codec, timeout_seconds=60, poll_seconds=0.005
            )
            for i in range(REPLICAS)
        ]
    nets = models(REPLICAS)
    return run_threads([partial(script, c, net) for c, net in zip(collectives, nets, strict=True)])


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_torchft_s_diloco_gives_the_bits_of_our_own_loop(codec: str) -> None:
    """Four replicas, ten rounds: the weights after each round, with our optimizer."""
    ours = in_threads(by_our_loop, codec)
    theirs = in_threads(partial(by_torchft, outer="ours"), codec)
    assert len(ours[0]) == ROUNDS
    for round in range(ROUNDS):
        for replica in range(REPLICAS):
            assert torch.equal(ours[replica][round], ours[0][round])
            assert torch.equal(theirs[replica][round], ours[0][round]), (round, replica)
    assert not torch.equal(ours[0][0], ours[0][-1])


def test_over_a_store_the_bits_are_the_same(tmp_path) -> None:
    in_memory = in_threads(by_our_loop)
    for name, script in (("ours", by_our_loop), ("theirs", partial(by_torchft, outer="ours"))):
        for replica in in_threads(script, folder=tmp_path / name):
            assert all(torch.equal(a, b) for a, b in zip(replica, in_memory[0], strict=True)), name


def test_with_torch_s_own_optimizer_to_rounding() -> None:
    ours, theirs = in_threads(by_our_loop), in_threads(partial(by_torchft, outer="torch"))
    assert all(torch.equal(a, b) for a, b in zip(theirs[0], theirs[-1], strict=True))
    # torch fuses multiply and add: half a unit in the last place of a weight (at most 2**-24 here) for each of the
    # three operations of a round. AdamW's steps depend on the weights, but a change of some 1e-8 in a gradient moves a
    # step of 0.01 by far less than that; momentum passes a difference on with a factor of up to 1 / (1 - 0.9) = 10.
    for round, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=10 * 3 * (round + 1) * 2.0**-24)


def test_the_pseudo_gradient_is_anchor_minus_local() -> None:
    """One replica at outer learning rate 1 without momentum: the outer step must lead to where training led.

    With the other sign it would lead as far to the other side of the anchor.
    """
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 5.0)
    manager = ObjectStoreManager(InProcessFleet(1).collectives()[0])
    asked: list[float] = []
    allreduce = manager.allreduce

    def watched(tensor, *arguments, **keywords):
        asked.append(tensor.item())
        return allreduce(tensor, *arguments, **keywords)

    manager.allreduce = watched  # type: ignore[method-assign]
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    with make_diloco_outer_loop(manager, [net], inner, outer_lr=1.0, outer_momentum=0.0, sync_every=2):
        for _ in range(2):  # 5 -> 4 -> 3
            inner.zero_grad()
            net(torch.ones(1, 1)).sum().backward()
            inner.step()
    assert asked == [2.0] and net.weight.item() == 3.0
    manager.shutdown()


def test_local_sgd_averages_the_weights_in_one_round_each() -> None:
    def work(collective, net):
        manager = MockManager(collective)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (collective.replica + 1))
        generator = torch.Generator().manual_seed(1)  # the same data, so that the mean is known
        before = weights(net)
        with local_sgd.LocalSGD(manager, net, optimizer, sync_every=1):
            trained(net, optimizer, generator)
        rounds = manager.state_dict()["round"]
        manager.shutdown()
        return before, weights(net), rounds

    collectives = InProcessFleet(2, timeout_seconds=60).collectives()
    (before, first, rounds), (_, second, _) = run_threads(
        [partial(work, c, net) for c, net in zip(collectives, models(2), strict=True)]
    )
    assert torch.equal(first, second) and rounds == 1, "four tensors, one round"
    (alone,) = models(1)
    trained(alone, torch.optim.SGD(alone.parameters(), lr=0.15), torch.Generator().manual_seed(1))
    # (w - 0.1 g) and (w - 0.2 g), averaged: w - 0.15 g, with a rounding for each of five operations on values below 1.
    torch.testing.assert_close(first, weights(alone), rtol=0, atol=5 * 2.0**-24)
    assert not torch.equal(first, before)


# -- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fragment_sync_delay": 1}, {"use_bucketization": True}], ids=str)
@pytest.mark.parametrize("face", ["manager", "all-reduce"])
def test_fragments(tmp_path, options, face) -> None:
    """Each fragment is exchanged once in sync_every steps; after its exchange it is the same on all replicas."""

    def work(replica, net):
        if face == "manager":
            uri = tmp_path.as_uri()
            manager = ObjectStoreManager(ObjectStoreCollective(uri, replica=replica, replicas=2, poll_seconds=0.005))
        else:
            manager = ObjectStoreAllReduce(replica, 2, tmp_path.as_uri(), poll_s=0.01, timeout_s=30)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        generator, seen = torch.Generator().manual_seed(replica), []
        with make_diloco_outer_loop(manager, [net[0], net[2]], optimizer, sync_every=4, **options):
            for step in range(1, 13):
                trained(net, optimizer, generator)
                if step % 2 == 0:
                    seen.append(weights(net[0] if step % 4 == 2 else net[2]))
        manager.shutdown()
        return seen, manager.state_dict()

    (first, state), (second, _) = run_threads([partial(work, i, net) for i, net in enumerate(models(2))])
    assert len(first) == 6 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    one_each = face == "manager" or "use_bucketization" in options
    assert state == {"step": 6, "batches_committed": 12, "round": 6 if one_each else 12}


def test_a_delayed_exchange_runs_while_training_goes_on() -> None:
    """Replica 0 trains on while replica 1 hasn't even begun the round: neither step waits for the other's."""
    meets = threading.Event()

    def work(collective, net):
        manager = ObjectStoreManager(collective)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(collective.replica)
        with make_diloco_outer_loop(manager, [net], optimizer, sync_every=3, fragment_sync_delay=1):
            trained(net, optimizer, generator)
            if collective.replica == 1:
                assert meets.wait(30), "replica 0 is held up by a round that it needn't wait for yet"
            trained(net, optimizer, generator)  # prepares the exchange, and sends it off
            if collective.replica == 0:
                meets.set()
            trained(net, optimizer, generator)  # waits for it
        manager.shutdown()
        return weights(net)

    collectives = InProcessFleet(2, timeout_seconds=60).collectives()
    first, second = run_threads([partial(work, c, net) for c, net in zip(collectives, models(2), strict=True)])
    assert torch.equal(first, second)


# -- beginnings, and what is refused ----------------------------------------------------------------------------------


def test_all_begin_with_the_lowest_replica_s_weights() -> None:
    def work(collective, net):
        manager = ObjectStoreManager(collective)
        make_diloco_outer_loop(manager, [net], torch.optim.SGD(net.parameters(), lr=0.1), sync_every=1)
        manager.shutdown()
        return weights(net)

    nets = models(2)
    for parameter in nets[1].parameters():
        nn.init.ones_(parameter)
    first, second = run_threads(
        [partial(work, c, n) for c, n in zip(InProcessFleet(2).collectives(), nets, strict=True)]
    )
    assert torch.equal(first, second) and torch.equal(first, weights(model()))


def test_unequal_beginnings_are_told_apart() -> None:
    """Through torchft's class itself nothing shares the weights: the first round finds out."""

    def work(collective, net):
        manager = ObjectStoreManager(collective)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sgd = torch.optim.SGD(net.parameters(), lr=0.7)
        with local_sgd.DiLoCo(manager, [net], optimizer, sgd, sync_every=1):
            trained(net, optimizer, torch.Generator().manual_seed(0))

    nets = models(2)
    nn.init.ones_(nets[1][0].bias)
    with pytest.raises(Diverged):
        run_threads([partial(work, c, n) for c, n in zip(InProcessFleet(2).collectives(), nets, strict=True)])
    other = nn.Sequential(nn.Linear(6, 2))
    with pytest.raises(FleetMismatch, match=r"0\.0\.weight"):
        run_threads(
            [
                lambda c=c, n=n: make_diloco_outer_loop(
                    ObjectStoreManager(c), [n], torch.optim.SGD(n.parameters(), lr=0.1), sync_every=1
                )
                for c, n in zip(InProcessFleet(2).collectives(), [model(), other], strict=True)
            ]
        )


def test_a_replica_goes_on_from_its_checkpoint_and_not_without(tmp_path) -> None:
    """Stop after round 2 and go on: the weights of the undisturbed run. Without its state it is refused, by name."""

    def work(replica, net, *, folder, steps, state=None):
        collective = ObjectStoreCollective(
            (tmp_path / folder).as_uri(), replica=replica, replicas=2, poll_seconds=0.005, checkpoint_every=1
        )
        manager, optimizer = ObjectStoreManager(collective), torch.optim.SGD(net.parameters(), lr=0.05)
        if state is not None:
            manager.load_state_dict(state["manager"])
            net.load_state_dict(state["net"])
        with make_diloco_outer_loop(manager, [net], optimizer, sync_every=1):
            if state is not None:
                manager.load_user_state_dict(state["user"])
            for step in steps:
                trained(net, optimizer, torch.Generator().manual_seed(100 * replica + step))
        kept = {"manager": manager.state_dict(), "net": net.state_dict(), "user": manager.user_state_dict()}
        manager.shutdown()
        return kept

    whole = run_threads([partial(work, i, n, folder="whole", steps=range(4)) for i, n in enumerate(models(2))])
    half = run_threads([partial(work, i, n, folder="half", steps=range(2)) for i, n in enumerate(models(2))])
    with pytest.raises(RoundError, match="the fleet is at round.*load_state_dict"):
        work(0, model(), folder="half", steps=range(2))
    rest = run_threads(
        [partial(work, i, n, folder="half", steps=range(2, 4), state=half[i]) for i, n in enumerate(models(2))]
    )
    assert rest[0]["manager"] == whole[0]["manager"] == {"step": 4, "batches_committed": 8, "round": 4}
    for name, tensor in whole[0]["net"].items():
        assert torch.equal(rest[0]["net"][name], tensor) and torch.equal(rest[1]["net"][name], tensor)


def test_what_makes_no_sense_is_refused() -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    manager = ObjectStoreManager(InProcessFleet(1).collectives()[0])
    with pytest.raises(ValueError, match="model_fragments"):
        make_diloco_outer_loop(manager, [], inner)
    with pytest.raises(ValueError, match="weight of fragment 1 is in fragment 0"):
        make_diloco_outer_loop(manager, [net, net[0]], inner)
    with pytest.raises(ValueError, match="bucket_cap_mb to at least 2"):
        big = nn.Linear(512, 600)
        make_diloco_outer_loop(manager, [big], inner, use_bucketization=True, bucket_cap_mb=1)
    with pytest.raises(ValueError, match="mixes dtypes"):
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
        make_diloco_outer_loop(manager, [mixed], inner, use_bucketization=True)
    with pytest.raises(ValueError, match="codec='int8'"):
        manager.allreduce(torch.ones(2), should_quantize=True)
    with pytest.raises(ValueError, match="int64"):
        manager.allreduce(torch.arange(2))
    manager.shutdown()


def test_narrow_weights_take_torch_s_step() -> None:
    """bfloat16 fragments, as in the first design: torch's SGD in their own dtype, the same on all replicas."""

    def work(collective, net):
        manager = ObjectStoreManager(collective)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with make_diloco_outer_loop(manager, [net], inner, sync_every=2):
            for step in range(4):
                inner.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + collective.replica)
                net(torch.randn(4, 6, generator=generator).bfloat16()).square().mean().backward()
                inner.step()
        manager.shutdown()
        return weights(net)

    nets = [net.bfloat16() for net in models(2)]
    first, second = run_threads(
        [partial(work, c, n) for c, n in zip(InProcessFleet(2).collectives(), nets, strict=True)]
    )
    assert torch.equal(first, second) and not torch.equal(first, weights(model().bfloat16()))
