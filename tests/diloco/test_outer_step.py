"""The outer step: DiLoCo's arithmetic bit for bit, and the same bits on every machine."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from composer_replication.diloco import outer_step
from composer_replication.diloco.outer_step import (
    OuterNesterov,
    average_step_,
    digest,
    nesterov_step_,
    pseudo_gradient,
)
from tests.diloco import outer_digest

ROOT = Path(__file__).parents[2]
SIZE = 2 * outer_step._BLOCK + 77  # two blocks and a short one


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (SIZE,)), generator=torch.Generator().manual_seed(seed))


def reference(anchor, momentum, gradients, lr, factor, divisor=1.0):
    """Unfused Nesterov momentum, one float32 operation at a time, in numpy."""
    theta, m = anchor.numpy().copy(), momentum.numpy().copy()
    lr, factor, divisor = np.float32(lr), np.float32(factor), np.float32(divisor)
    for gradient in gradients:
        g = gradient.numpy() / divisor
        m = factor * m
        m = m + g
        step = factor * m
        step = g + step
        theta = theta - lr * step
    return theta, m


@pytest.mark.parametrize("divisor", [1.0, 1.37])
@pytest.mark.parametrize(("lr", "factor"), [(0.7, 0.9), (0.7, 0.7), (1.0, 0.0), (1.05, 0.9471)])
def test_equals_an_unfused_reference_bit_for_bit(lr: float, factor: float, divisor: float) -> None:
    anchor, momentum, gradients = randn(1), torch.zeros(SIZE), [randn(seed) for seed in (2, 3, 4)]
    theta, m = reference(anchor, momentum, gradients, lr, factor, divisor)
    for gradient in gradients:
        kept = gradient.clone()
        nesterov_step_(anchor, momentum, gradient, lr=lr, momentum_factor=factor, divisor=divisor)
        assert torch.equal(gradient, kept), "the mean is left as it is"
    assert np.array_equal(anchor.numpy(), theta)
    assert np.array_equal(momentum.numpy(), m)


def test_equals_torch_sgd_to_rounding() -> None:
    start, gradients = randn(1), [randn(seed) for seed in range(2, 8)]
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    anchor, momentum = start.clone(), torch.zeros(SIZE)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        sgd.step()
        nesterov_step_(anchor, momentum, gradient, lr=0.7, momentum_factor=0.9)
    # Six steps of a few float32 roundings each, of values below 64: fused and unfused differ by a rounding each.
    torch.testing.assert_close(anchor, parameter.detach(), rtol=0, atol=6 * 4 * 64 * 2.0**-24)


def test_one_replica_at_rate_one_without_momentum_is_plain_training() -> None:
    anchor, local, momentum = randn(1), randn(2), torch.zeros(SIZE)
    gradient = pseudo_gradient(anchor, local, torch.empty(SIZE))
    nesterov_step_(anchor, momentum, gradient, lr=1.0, momentum_factor=0.0)
    # a - (a - l), both differences rounded to float32: off by a rounding of a - l, whose size is below 16.
    torch.testing.assert_close(anchor, local, rtol=0, atol=16 * 2.0**-24)


def test_hand_computed() -> None:
    """theta = 0, replicas at +1 and +3: the mean pseudo-gradient is -2, twice; lr 1, momentum 0.9."""
    anchor, momentum, mean = torch.zeros(1), torch.zeros(1), torch.tensor([-2.0])
    nesterov_step_(anchor, momentum, mean, lr=1.0, momentum_factor=0.9)
    assert anchor.item() == pytest.approx(3.8, abs=1e-6)  # 2 + 0.9 * 2
    nesterov_step_(anchor, momentum, mean, lr=1.0, momentum_factor=0.9)
    assert anchor.item() == pytest.approx(9.22, abs=2e-6)  # 3.8 + 2 + 0.9 * (0.9 * 2 + 2)
    assert momentum.item() == pytest.approx(-3.8, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_local_weights_follow_in_their_own_dtype(dtype: torch.dtype) -> None:
    anchor, momentum, mean = randn(1), randn(2), randn(3)
    local = torch.zeros(SIZE, dtype=dtype)
    nesterov_step_(anchor, momentum, mean, lr=0.7, momentum_factor=0.9, local=local)
    assert torch.equal(local, anchor.to(dtype))
    average_step_(anchor, mean, local=local)
    assert torch.equal(local, anchor.to(dtype))


def test_average_step() -> None:
    anchor, locals_ = randn(1), [randn(2), randn(3)]
    mean = sum(anchor - local for local in locals_) / 2
    before = anchor.clone()
    average_step_(anchor, mean)
    assert torch.equal(anchor, before - mean)


def test_the_block_size_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for block in (1000, 4096, 10 * SIZE):
        monkeypatch.setattr(outer_step, "_BLOCK", block)
        anchor, momentum = randn(1), randn(2)
        nesterov_step_(anchor, momentum, randn(3), lr=0.7, momentum_factor=0.9, divisor=1.1)
        results.append((anchor, momentum))
    for anchor, momentum in results[1:]:
        assert torch.equal(anchor, results[0][0]) and torch.equal(momentum, results[0][1])


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \[3\] and \[1\]"):
        nesterov_step_(torch.zeros(3), torch.zeros(3), torch.zeros(1), lr=1.0, momentum_factor=0.0)
    with pytest.raises(ValueError, match="one shape"):
        average_step_(torch.zeros(3), torch.zeros(4))


def test_digest_sees_every_bit() -> None:
    def of(anchor=(1.0, 2.0), momentum=(3.0, 4.0), name="w", text="{}") -> str:
        return digest([(name, torch.tensor(anchor), torch.tensor(momentum))], text)

    assert of() == of()
    changed = [
        of(anchor=(1.0, 2.0000002)),
        of(momentum=(3.0, -4.0)),
        of(anchor=(3.0, 4.0), momentum=(1.0, 2.0)),
        of(name="v"),
        of(text="{ }"),
        of(anchor=(-0.0, 2.0)),
        of(anchor=(0.0, 2.0)),
    ]
    assert len({of(), *changed}) == len(changed) + 1


# -- the optimizer ----------------------------------------------------------------------------------------------------


def test_optimizer_is_the_same_arithmetic() -> None:
    shapes = [(7,), (3, 5), (4, 2, 3, 3), ()]
    parameters = [
        torch.nn.Parameter(randn(i, *shape) if shape else torch.tensor(0.5)) for i, shape in enumerate(shapes)
    ]
    parameters[2] = torch.nn.Parameter(parameters[2].detach().to(memory_format=torch.channels_last))
    anchors = [p.detach().clone().contiguous() for p in parameters]
    momenta = [torch.zeros_like(a) for a in anchors]
    optimizer = OuterNesterov(parameters, lr=0.7, momentum=0.9)
    for seed in (10, 20, 30):
        for i, parameter in enumerate(parameters):
            gradient = randn(seed + i, *parameter.shape) if parameter.shape else torch.tensor(0.1 * seed)
            parameter.grad = gradient
            nesterov_step_(anchors[i], momenta[i], gradient, lr=0.7, momentum_factor=0.9)
        optimizer.step()
    for parameter, anchor in zip(parameters, anchors, strict=True):
        assert torch.equal(parameter.detach(), anchor)


def test_optimizer_without_nesterov() -> None:
    parameter = torch.nn.Parameter(torch.tensor([0.0]))
    optimizer = OuterNesterov([parameter], lr=1.0, momentum=0.5, nesterov=False)
    for expected in (-2.0, -5.0):  # m = 2, then 0.5 * 2 + 2 = 3
        parameter.grad = torch.tensor([2.0])
        optimizer.step()
        assert parameter.item() == expected


def test_optimizer_state_is_saved_and_loaded() -> None:
    def step(parameter: torch.nn.Parameter, optimizer: OuterNesterov, seed: int) -> None:
        parameter.grad = randn(seed, 6)
        optimizer.step()

    one = torch.nn.Parameter(randn(1, 6))
    first = OuterNesterov([one])
    step(one, first, 2)
    two = torch.nn.Parameter(one.detach().clone())
    second = OuterNesterov([two], lr=0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch shares the tensors otherwise
    step(one, first, 3)
    step(two, second, 3)
    assert torch.equal(one, two)
    assert second.param_groups[0]["lr"] == 0.7


def test_optimizer_takes_a_scheduler_a_closure_and_missing_gradients() -> None:
    moved, still = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = OuterNesterov([moved, still], lr=1.0, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (moved * 3.0).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6.0
    scheduler.step()
    assert moved.tolist() == [-2.0, -2.0] and still.tolist() == [1.0, 1.0]
    optimizer.step()
    assert moved.tolist() == [-3.5, -3.5]


def test_optimizer_refuses_what_it_cannot_honour() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="lr must be greater than 0, got 0"):
        OuterNesterov([parameter], lr=0.0)
    with pytest.raises(ValueError, match=r"momentum must be .* got 1\.0"):
        OuterNesterov([parameter], momentum=1.0)
    with pytest.raises(ValueError, match="parameter 1 must be float32, got torch.bfloat16"):
        OuterNesterov([parameter, torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense float32"):
        OuterNesterov(embedding.parameters()).step()


# -- the same bits everywhere -----------------------------------------------------------------------------------------


def _digests(capability: str, threads: list[int]) -> tuple[str, list[str]]:
    env = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": capability,
        "PYTHONPATH": str(ROOT),
        "OMP_WAIT_POLICY": "passive",  # several threads on a busy machine would spin for each other
    }
    command = [sys.executable, str(ROOT / "tests" / "diloco" / "outer_digest.py"), *map(str, threads)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    used, *digests = done.stdout.split()
    return used.lower(), digests


@pytest.mark.processes
def test_bits_depend_on_neither_threads_nor_instruction_set() -> None:
    native = torch.backends.cpu.get_cpu_capability().lower()
    here = outer_digest.main(1)
    assert outer_digest.main(2) == here
    # x86 can be asked for lower instruction sets than its own by name; elsewhere there is one only.
    for capability in {"avx512": ["default", "avx2"], "avx2": ["default"]}.get(native, []):
        used, digests = _digests(capability, [1, 2, 4])
        assert used != native, "the variable was not heeded"
        assert digests == [here] * 3, (native, capability)
