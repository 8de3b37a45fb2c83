"""The built-in model: causal, tied, and able to learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from composer_replication.tasks.byte_gpt import ByteGPT
from composer_replication.tasks.optim import build_optimizer, build_scheduler, lr_factor


def test_a_position_sees_only_what_came_before_it():
    model = ByteGPT(width=16, layers=2, heads=2, context=12).eval()
    ids = torch.randint(0, 256, (2, 12))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(ids), model(changed)
    # The same arithmetic on the same numbers: equal to the bit, unless the kernel splits the work by length.
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_order_matters():
    model = ByteGPT(width=16, layers=1, heads=2, context=4).eval()
    a, b = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(a[0, -1], b[0, -1])


def test_embedding_and_head_are_one_tensor():
    model = ByteGPT(width=16, layers=1, heads=2, context=4)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"width": 10, "heads": 4}, "width"),
        ({"layers": 0}, "layers"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(sizes, word):
    with pytest.raises(ValueError, match=word):
        ByteGPT(**sizes)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="context of 4"):
        ByteGPT(width=16, layers=1, heads=2, context=4)(torch.zeros(1, 5, dtype=torch.int64))


def test_it_learns_a_repeated_phrase():
    phrase = torch.tensor(list(b"each replica trains alone. " * 8))
    model = ByteGPT(width=32, layers=1, heads=2, context=64)
    optimizer = build_optimizer(model.parameters(), name="AdamW", lr=1e-2)
    losses = []
    for step in range(60):
        window = phrase[step % 27 : step % 27 + 65][None]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5 > 1 > losses[-1]  # from ln 256 = 5.5 to nearly certain


def test_norms_are_not_decayed():
    model = ByteGPT(width=16, layers=1, heads=2, context=4)
    matrices, vectors = build_optimizer(model.parameters(), name="sgd", lr=0.1, weight_decay=0.3).param_groups
    assert matrices["weight_decay"] == 0.3 and vectors["weight_decay"] == 0.0
    assert all(p.dim() >= 2 for p in matrices["params"]) and all(p.dim() < 2 for p in vectors["params"])


def test_schedules_by_hand():
    cosine = {"name": "cosine", "steps": 110, "warmup_steps": 10, "final_fraction": 0.2}
    assert lr_factor(0, **cosine) == pytest.approx(0.1)
    assert lr_factor(9, **cosine) == 1.0
    assert lr_factor(60, **cosine) == pytest.approx(0.6)  # half way down from 1 to 0.2
    assert lr_factor(110, **cosine) == pytest.approx(0.2)
    assert lr_factor(500, **cosine) == pytest.approx(0.2)  # never climbs again
    linear = {"name": "linear", "steps": 100, "warmup_steps": 0, "final_fraction": 0.0}
    assert [lr_factor(s, **linear) for s in (0, 25, 100)] == [1.0, 0.75, 0.0]
    assert lr_factor(7, name="constant", steps=10, warmup_steps=0, final_fraction=0.0) == 1.0


def test_unknown_names_list_the_known_ones():
    model = ByteGPT(width=16, layers=1, heads=2, context=4)
    with pytest.raises(ValueError, match="adamw, adam, sgd"):
        build_optimizer(model.parameters(), name="lion", lr=0.1)
    optimizer = build_optimizer(model.parameters(), name="sgd", lr=0.1)
    with pytest.raises(ValueError, match="cosine, linear, constant"):
        build_scheduler(optimizer, name="step", steps=10)
