"""A loader of an endless stream of examples that a checkpoint can put back to where it was, to the very example.

Invariant: each batch brings along where its worker stood after it, so that the place in a checkpoint is that of the
batches which were handed out, however many more the workers have prepared.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from composer_replication.adapter.data import ShardedIterable

__all__ = ["ENDLESS", "Stream", "StreamLoader"]

ENDLESS = 1 << 40  # a trainer that knows no length fetches a batch too early, and its checkpoints would be one ahead
Place = dict[str, Any]


class Stream(ShardedIterable):
    """Examples without end, each with its place. Iterated by one `StreamLoader`.

    The place of the loader's workers is kept here, as Composer asks the dataset for it, and Lightning the loader.
    """

    _workers = 1  # of the loader
    _batch_size = 1
    _handed = 0  # batches
    _places: dict[str, Place] = {}  # by a worker's number in the order of its batches

    @abstractmethod
    def examples(self, place: Place) -> Iterator[tuple[dict[str, Tensor], Place]]:
        """(example, the place behind it) from `place` on, which is {} at the beginning; without end."""

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Place, str] | None]:
        worker = get_worker_info()
        index = worker.id if worker is not None else 0
        if index < self._handed % self._workers:
            # Batches come from the workers in turn, and torch begins with the first, though it isn't that one's turn
            # after a resume: an empty batch, which the loader passes over.
            yield from repeat(None, self._batch_size)
        for example, place in self.examples(self._places.get(str(index), {})):
            yield example, place, str(index)

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def serve(self, *, workers: int, batch_size: int) -> None:
        self._workers, self._batch_size = max(1, workers), batch_size

    def handed(self, worker: str, place: Place) -> None:
        self._places = {**self._places, worker: place}
        self._handed += 1

    def state_dict(self, *_: Any) -> dict[str, Any]:
        """Behind the last batch that was handed out. Composer gives arguments, which say the same."""
        return {"workers": self._workers, "handed": self._handed, "places": dict(self._places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the loader had another number of workers."""
        if state["workers"] != self._workers:
            raise ValueError(
                f"workers must be {state['workers']}, as when the checkpoint was made, not {self._workers}: what "
                "each of them reads depends on it"
            )
        self._handed, self._places = state["handed"], dict(state["places"])


class _Together:
    def __init__(self, collate: Callable[[Sequence[dict[str, Tensor]]], dict[str, Tensor]]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Any]) -> Any:
        if items[0] is None:
            return None
        _, place, worker = items[-1]
        return self.collate([example for example, _, _ in items]), place, worker


class StreamLoader(DataLoader[Any]):
    """Batches of a `Stream`. To be iterated once."""

    def __init__(
        self,
        stream: Stream,
        *,
        batch_size: int,
        collate: Callable[[Sequence[dict[str, Tensor]]], dict[str, Tensor]],
        workers: int = 0,
    ) -> None:
        super().__init__(stream, batch_size=batch_size, collate_fn=_Together(collate), num_workers=workers)
        self.stream, self._collate = stream, collate
        stream.serve(workers=workers, batch_size=batch_size)

    def larger(self, times: int) -> StreamLoader:
        """The same with batches of as many times the size."""
        assert self.batch_size is not None
        return StreamLoader(
            self.stream, batch_size=self.batch_size * times, collate=self._collate, workers=self.num_workers
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]  # torch's is a class of its own
        for found in super().__iter__():
            if found is not None:
                batch, place, worker = found
                self.stream.handed(worker, place)
                yield batch

    def __len__(self) -> int:
        return ENDLESS

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
