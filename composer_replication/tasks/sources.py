"""Where rows come from: files at a URI, or a data set by its name on the Hub; and the tokenizer that reads them.

Invariant: every row comes with the words that say where it stands, so that whatever is wrong with it can be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.utils.data import get_worker_info

from composer_replication.errors import RecipeError
from composer_replication.tasks.causal_lm import load_error, transformers_module
from composer_replication.tasks.corpus import rows

__all__ = ["Source", "load_tokenizer", "padding_id", "two_sources"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One split. Exactly one of `uri` (files, see `corpus.documents`) and `dataset` (a name, or a folder)."""

    field: str
    uri: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if (self.uri is None) == (self.dataset is None):
            said = "both" if self.uri else "neither"
            raise ValueError(f"give uri (files) or dataset (a name on the Hub), not {said}")
        if self.dataset is not None and not self.split:
            raise ValueError(f"split is missing: which part of {self.dataset}, for example train?")

    def __str__(self) -> str:
        return str(self.uri).partition("?")[0] if self.uri is not None else f"{self.dataset} ({self.split})"

    def rows(self, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[str, Any]]:
        """(where, the value of `field`) of each row of one of `part[1]` equal parts, read as they are asked for.

        In a loader's worker only that worker's share of the part. Raises ValueError for what can't be read, StoreError
        while nobody answers.
        """
        if self.uri is not None:
            worker = get_worker_info()
            if worker is not None:
                part = (part[0] * worker.num_workers + worker.id, part[1] * worker.num_workers)
            yield from rows(self.uri, field=self.field, part=part)
            return
        for number, row in enumerate(self._stream(part), 1):
            where = f"{self}, row {number}" + (f" of part {part[0] + 1} of {part[1]}" if part[1] > 1 else "")
            if self.field not in row:
                raise ValueError(f"{where} has no field {self.field!r} (it has {', '.join(row)})")
            yield where, row[self.field]

    def _stream(self, part: tuple[int, int]) -> Iterator[dict[str, Any]]:
        assert self.dataset is not None
        try:
            library = import_module("datasets")
            nodes = import_module("datasets.distributed")
        except ImportError as error:
            raise RecipeError(
                f"{self.dataset} needs the package datasets ({error}): pip install 'composer-replication[datasets]'"
            ) from error
        try:
            found = library.load_dataset(
                self.dataset, self.config, split=self.split, revision=self.revision, streaming=True
            )
            # Deals files where their number allows it, else rows; among a loader's workers it does so by itself.
            yield from nodes.split_dataset_by_node(found, rank=part[0], world_size=part[1])
        except (OSError, ValueError, KeyError) as error:
            raise load_error(self.dataset, "data set", error) from error


def two_sources(
    train: tuple[str | None, str], held: tuple[str | None, str], dataset: str | None, **common: Any
) -> tuple[Source, Source]:
    """Of (uri, split) to train on and for validation. Raises ValueError for what is missing, or given twice."""
    first = Source(uri=train[0], split=train[1], dataset=dataset, **common)
    if dataset is None and held[0] is None:
        raise ValueError("validation_uri is missing: files for validation, of which the first rows are taken")
    return first, Source(uri=held[0], split=held[1], dataset=dataset, **common)


def load_tokenizer(path: str, revision: str | None = None, *, fetch: bool = True) -> Any:
    """Raises ValueError for what can't be loaded, StoreError while the Hub can't be reached, or, without `fetch`, for
    what this machine's cache doesn't have."""
    where: dict[str, Any] = {"revision": revision} if revision else {}
    if not fetch:
        where["local_files_only"] = True
    try:
        return transformers_module().AutoTokenizer.from_pretrained(path, **where)
    except (OSError, ValueError, KeyError) as error:
        raise load_error(path, "tokenizer", error) from error


def padding_id(encoder: Any, path: str, named: str | None) -> int:
    """The token that fills what is padded: `named`, or the tokenizer's own. Raises ValueError with the remedy."""
    if named is None:
        if encoder.pad_token_id is not None:
            return int(encoder.pad_token_id)
        own = f", for example its end-of-text token {encoder.eos_token!r}" if encoder.eos_token else ""
        raise ValueError(
            f"pad_token is missing: the tokenizer {path} has no padding token; name one of its tokens{own} (what is "
            "padded is neither looked at nor counted, so that any will do)"
        )
    found = encoder.get_vocab().get(named)
    if found is None:
        raise ValueError(f"pad_token must be a token of {path}, not {named!r}")
    return int(found)
