"""What a reader of a page about Composer has: a model, data, and arguments of a Trainer."""

from composer import Trainer  # noqa: F401
from torch.utils.data import DataLoader  # noqa: F401

from composer_replication.composer import AutoLoCo, replica_sampler  # noqa: F401
from tests.composer.helpers import Regression
from tests.lightning.helpers import Numbered

replica = 0
model, dataset = Regression(), Numbered(64)
others = {
    "Trainer": {"model": model, "device": "cpu", "progress_bar": False, "run_name": "docs"},
    "AutoLoCo": {"store": "file:///shared/run1", "base_horizon": 4},
}
