"""A training loop of one's own, with the rounds added: two replicas, two terminals, one folder.

    python examples/plain_loop.py file:///tmp/plain-run 0 2
    python examples/plain_loop.py file:///tmp/plain-run 1 2

The lines marked with # << are all that there is to add. Both end with the same weights, to the last bit.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from composer_replication import AutoLoCoConfig, AutoLoCoPolicy, ObjectStoreCollective, OuterLoop
from composer_replication.autoloco import Preview
from composer_replication.preview import LoopPosition, Previewer, Scheduled

STEPS = 60


def main(store: str, replica: int, replicas: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(replica)  # each replica has data of its own

    collective = ObjectStoreCollective(store, replica=replica, replicas=replicas)  # <<
    policy = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=10))  # <<
    loop = OuterLoop(model, collective, policy=policy)  # <<
    ahead = Previewer(optimizer, [Scheduled(scheduler=scheduler)])  # << reads the schedule ahead, exactly

    def preview(done: int) -> Preview:  # << the learning rates to come, from the next step on
        return ahead.take(LoopPosition(batch=done), grid=loop.grid, remaining=STEPS - done).preview

    loop.start(preview(0))  # << joins the fleet; the model holds replica 0's first weights now
    for done in range(1, STEPS + 1):
        inputs = torch.randn(32, 16, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        loop.before_step()  # << notices layers that have been unfrozen
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        loop.step_done(lr=rate)  # << counts a step that changed the weights
        scheduler.step()
        optimizer.zero_grad()
        if loop.due or loop.overtaken:  # << the interval is complete, or the others closed the round without us
            summary = loop.close_interval(preview(done))  # << the model holds the shared weights now
            print(f"round {summary.round}: {summary.steps} steps, loss {loss.item():.4f}")
    final = loop.finish(preview(STEPS))  # << the rest of an interval, and the wait for those who are still training
    loop.close()  # <<
    print(f"final weights {final.digest}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
