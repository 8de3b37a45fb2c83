"""Documents turned to tokens as they are read: what one pre-trains on. Needs `transformers` and `fsspec`.

Invariant: a replica's examples are a function of the files, the settings and its place in the fleet; each document goes
to one replica, and only that one turns it into tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from composer_replication.isolate import Identity, read_identity
from composer_replication.tasks.corpus import is_text
from composer_replication.tasks.examples import Examples, Padded, example_of
from composer_replication.tasks.sizes import check_sizes
from composer_replication.tasks.sources import Source, load_tokenizer, padding_id, two_sources
from composer_replication.tasks.streams import Place, Stream, StreamLoader
from composer_replication.tasks.text import Collate, Windows

__all__ = ["DocumentData", "DocumentStream", "document_stream"]


class DocumentStream(Stream):
    """This process's share of a source's documents: as windows of `context` tokens, or one example each."""

    def __init__(self, source: Source, encoder: Any, *, context: int, pack: bool, identity: Identity) -> None:
        super().__init__((), identity)
        self.source, self.encoder, self.context, self.pack = source, encoder, context, pack

    def examples(self, place: Place) -> Iterator[tuple[dict[str, Tensor], Place]]:
        # `documents` were used up of this pass through the share, and of the last one the tokens in `rest` are left.
        documents, rest = place.get("documents", 0), list(place.get("rest", ()))
        while True:
            before, given = documents, 0
            for text in islice(_texts(self.source, (self.share.shard, self.share.replicas)), documents, None):
                documents += 1
                tokens = _tokens(self.encoder, text)
                if not self.pack:
                    if len(tokens) < 2:  # nothing follows its one token
                        continue
                    given += 1
                    yield example_of(tokens[: self.context]), {"documents": documents}
                    continue
                rest = [*rest, *tokens]
                while len(rest) > self.context:
                    window = torch.tensor(rest[: self.context + 1], dtype=torch.int64)
                    rest = rest[self.context :]
                    yield {"input_ids": window[:-1], "labels": window[1:]}, {"documents": documents, "rest": rest}
            if documents == before == 0:
                who = f"replica {self.identity.replica} of {self.identity.replicas}"
                raise ValueError(f"{self.source} gives {who} no document: it has fewer than there are readers")
            if not self.pack and not given and before == 0:
                raise ValueError(f"{self.source} gives no document of two tokens or more")
            documents = 0


@dataclass(frozen=True, kw_only=True)
class DocumentData:
    """Loaders of the stream, and of some documents in memory for validation."""

    train: DocumentStream
    validation: Dataset[dict[str, Tensor]]
    batch_size: int
    workers: int
    collate: Collate
    validation_collate: Collate | None
    validation_batch_size: int

    def train_dataloader(self) -> StreamLoader:
        return StreamLoader(self.train, batch_size=self.batch_size, collate=self.collate, workers=self.workers)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.validation, batch_size=self.validation_batch_size, collate_fn=self.validation_collate)


def document_stream(
    *,
    tokenizer: str,
    uri: str | None = None,
    validation_uri: str | None = None,
    dataset: str | None = None,
    config: str | None = None,
    split: str = "train",
    validation_split: str = "validation",
    field: str = "text",
    context: int = 1024,
    pack: bool = True,
    batch_size: int = 8,
    validation_documents: int = 4096,
    validation_batch_size: int | None = None,
    pad_token: str | None = None,
    revision: str | None = None,
    dataset_revision: str | None = None,
    workers: int = 0,
    trial: bool = False,
) -> DocumentData:
    """Stream documents, each replica its own, over and over again; the first of others are kept for validation.

    Args:
        tokenizer: its name on the Hub (`owner/name`), or its folder.
        uri, validation_uri: files of rows, as in `corpus.documents`; or
        dataset, config, split, validation_split: a data set by its name on the Hub, through `datasets`.
        field: of a row, which holds its text. Rows without any are passed over.
        context: tokens in an example.
        pack: documents follow one another, end-of-text in between, in full windows. Otherwise each one is an example
            of its own, cut or padded to `context`.
        validation_documents: the first so many, each whole with `pack`, else cut to `context`.
        pad_token: what is padded with, for a tokenizer that has no padding token. Not needed with `pack`.
        revision, dataset_revision: of the tokenizer and of the data set, on the Hub.
        trial: the first documents, whoever this process is, and no more for validation than a batch takes.

    Raises ValueError when a setting is out of range or when there is no such tokenizer or data, StoreError while a
    store or the Hub doesn't answer, RecipeError without `transformers` or `datasets`.
    """
    held_batch = batch_size if validation_batch_size is None else validation_batch_size
    check_sizes(batch_size=batch_size, validation_batch_size=held_batch, validation_documents=validation_documents)
    check_sizes(2, context=context)
    check_sizes(0, workers=workers)
    source, held = two_sources(
        (uri, split), (validation_uri, validation_split), dataset, config=config, field=field, revision=dataset_revision
    )
    encoder = load_tokenizer(tokenizer, revision, fetch=not trial)
    padded = None if pack else Padded(padding_id(encoder, tokenizer, pad_token), context)
    identity = Identity(replica=0, replicas=1) if trial else read_identity()
    train = DocumentStream(source, encoder, context=context, pack=pack, identity=identity)
    return DocumentData(
        train=train,
        validation=_validation(held, encoder, context, pack, validation_documents, held_batch if trial else None),
        batch_size=batch_size,
        workers=workers,
        collate=padded or _stacked,
        validation_collate=None if padded is None else Padded(padded.token),
        validation_batch_size=held_batch,
    )


def _texts(source: Source, part: tuple[int, int]) -> Iterator[str]:
    for where, text in source.rows(part):
        if text is not None and not is_text(text):
            kind = "half a character" if isinstance(text, str) else type(text).__name__
            raise ValueError(f"{where} has no text in the field {source.field!r}, but {kind}")
        if text is not None and text.strip():
            yield text


def _tokens(encoder: Any, text: str) -> list[int]:
    ids = encoder(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return ids if encoder.eos_token_id is None else [*ids, encoder.eos_token_id]


def _validation(
    source: Source, encoder: Any, context: int, pack: bool, count: int, examples: int | None
) -> Dataset[dict[str, Tensor]]:
    """Of so many documents, or, of fewer, as many as so many examples take."""
    found: list[list[int]] = []
    enough = math.inf if examples is None else examples * context + 1 if pack else examples
    for text in islice(_texts(source, (0, 1)), count):
        found.append(_tokens(encoder, text))
        enough -= len(found[-1]) if pack else len(found[-1]) > 1
        if enough <= 0:
            break
    data: Any
    if pack:
        data = Windows(torch.tensor([token for tokens in found for token in tokens], dtype=torch.int32), context)
    else:
        data = Examples((tokens[:context], None) for tokens in found if len(tokens) > 1)
    if not len(data):
        raise ValueError(f"{source} gives no example of up to {context} tokens for validation")
    return data


def _stacked(examples: Any) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in examples]) for name in examples[0]}
