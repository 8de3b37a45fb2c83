"""Hugging Face's Trainer with the rounds in a callback: two replicas, two terminals, one folder.

    pip install 'composer-replication' transformers accelerate
    python examples/hf_trainer.py file:///tmp/trainer-run 0 2
    python examples/hf_trainer.py file:///tmp/trainer-run 1 2

The class `Rounds` is all that there is to add. The model is a tiny Llama made from a configuration, the data are
made up: nothing is downloaded. Both replicas end with the same weights, to the last bit.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from composer_replication import AutoLoCoConfig, AutoLoCoPolicy, ObjectStoreCollective, OuterLoop
from composer_replication.autoloco import Preview
from composer_replication.collective.base import Collective
from composer_replication.preview import LoopPosition, Previewer, Scheduled

STEPS, BATCH, LENGTH = 24, 4, 12


class Rounds(TrainerCallback):
    """Train alone for an interval, meet the other replicas, take one outer step."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective

    def preview(self, state: Any) -> Preview:
        """The learning rates to come."""
        done = state.global_step
        return self.ahead.take(LoopPosition(batch=done), grid=self.loop.grid, remaining=state.max_steps - done).preview

    def on_train_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **_) -> None:
        policy = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=6))
        self.loop = OuterLoop(model, self.collective, policy=policy)
        self.ahead = Previewer(optimizer.optimizer, [Scheduled(scheduler=lr_scheduler)])
        self.loop.start(self.preview(state))

    def on_pre_optimizer_step(self, args, state, control, *, optimizer, **_) -> None:
        self.loop.before_step()
        self.rate = optimizer.param_groups[0]["lr"]

    def on_optimizer_step(self, args, state, control, *, optimizer, **_) -> None:
        if not optimizer.step_was_skipped:
            self.loop.step_done(lr=self.rate)

    def on_step_end(self, args, state, control, **_) -> None:
        if self.loop.due or self.loop.overtaken:
            summary = self.loop.close_interval(self.preview(state))
            print(f"round {summary.round}: {summary.steps} steps")

    def on_train_end(self, args, state, control, **_) -> None:
        print(f"final weights {self.loop.finish(self.preview(state)).digest}")
        self.loop.close()


class Counting(IterableDataset):
    """Endless sequences that count up, each replica's from its own beginnings."""

    def __init__(self, replica: int) -> None:
        self.replica = replica

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.replica)
        while True:
            first = torch.randint(64, (1,), generator=generator)
            tokens = (first + torch.arange(LENGTH)) % 64
            yield {"input_ids": tokens, "labels": tokens}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def main(store: str, replica: int, replicas: int) -> None:
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        use_cpu=True,  # leave it out to train on the GPU
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rounds = Rounds(ObjectStoreCollective(store, replica=replica, replicas=replicas))
    Trainer(make_model(), arguments, train_dataset=Counting(replica), callbacks=[rounds]).train()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
