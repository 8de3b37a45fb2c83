"""The loop of plain_loop.py under Hugging Face Accelerate: two replicas, two terminals, one folder.

    pip install 'composer-replication' accelerate
    python examples/accelerate_loop.py file:///tmp/accelerate-run 0 2
    python examples/accelerate_loop.py file:///tmp/accelerate-run 1 2

The lines marked with # << are all that there is to add. Each replica is a process of its own to Accelerate, too: it
must not make one world of them. Both end with the weights of plain_loop.py, to the last bit.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn

from composer_replication import AutoLoCoConfig, AutoLoCoPolicy, ObjectStoreCollective, OuterLoop
from composer_replication.autoloco import Preview
from composer_replication.preview import LoopPosition, Previewer, Scheduled

STEPS = 60


def main(store: str, replica: int, replicas: int) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(replica)  # each replica has data of its own
    ahead = Previewer(optimizer, [Scheduled(scheduler=scheduler)])  # << before they are wrapped
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    collective = ObjectStoreCollective(store, replica=replica, replicas=replicas)  # <<
    policy = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=10))  # <<
    loop = OuterLoop(accelerator.unwrap_model(model), collective, policy=policy)  # <<

    def preview(done: int) -> Preview:  # << the learning rates to come, from the next step on
        return ahead.take(LoopPosition(batch=done), grid=loop.grid, remaining=STEPS - done).preview

    loop.start(preview(0))  # <<
    for done in range(1, STEPS + 1):
        inputs = torch.randn(32, 16, generator=generator).to(accelerator.device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        accelerator.backward(loss)
        loop.before_step()  # <<
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        if not optimizer.step_was_skipped:  # << a gradient scaler may skip one: the weights haven't changed
            loop.step_done(lr=rate)  # <<
        scheduler.step()
        optimizer.zero_grad()
        if loop.due or loop.overtaken:  # <<
            summary = loop.close_interval(preview(done))  # <<
            accelerator.print(f"round {summary.round}: {summary.steps} steps, loss {loss.item():.4f}")
    final = loop.finish(preview(STEPS))  # <<
    loop.close()  # <<
    accelerator.print(f"final weights {final.digest}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
