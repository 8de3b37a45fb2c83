"""What a reader of a page about Lightning has: a module, data, and arguments of a Trainer."""

import os
from functools import partial  # noqa: F401

import lightning.pytorch as pl  # noqa: F401
import torch  # noqa: F401
from torch.distributed.fsdp import fully_shard  # noqa: F401
from torch.utils.data import DataLoader

from composer_replication.lightning import AutoLoCoCallback, latest_checkpoint, shard_iterable  # noqa: F401
from tests.lightning.helpers import Numbered, Tiny

replica = 0
module, dataset = Tiny(), Numbered(64)
loader = train_loader = DataLoader(dataset, batch_size=4)
ours = {"store": "file:///shared/run1", "replica": 0, "replicas": 1, "base_horizon": 4}
others = {"Trainer": {"max_steps": 8, "accelerator": "cpu"}, "AutoLoCoCallback": ours}
callback = AutoLoCoCallback(**ours)
trainer = pl.Trainer(max_steps=8, strategy="local_replica", callbacks=[callback], logger=False)

with open(os.open("signing.key", os.O_CREAT | os.O_WRONLY, 0o600), "w") as key:
    key.write("k" * 44)
