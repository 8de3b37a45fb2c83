"""Text as a model's tokens, cut into full windows: what `causal_lm` trains on. Needs `transformers` and `fsspec`.

Invariant: the tokens are a function of the files, the tokenizer and the settings. All replicas read the same ones, and
each is dealt windows of its own by the trainer's distributed sampler. There is no padding, so that none is counted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from composer_replication.tasks import DATA_URI
from composer_replication.tasks.corpus import documents
from composer_replication.tasks.sizes import check_sizes
from composer_replication.tasks.sources import load_tokenizer
from composer_replication.tasks.text import TextData, Windows

__all__ = ["text_lm"]

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 1 << 22  # given to the tokenizer at once: it works on its pieces side by side
_LONGEST_CONTEXT = 1024  # unless one is asked for


def text_lm(
    *,
    tokenizer: str,
    uri: str | None = None,
    field: str = "text",
    context: int | None = None,
    batch_size: int = 8,
    max_tokens: int = 1 << 28,
    validation_tokens: int = 1 << 18,
    revision: str | None = None,
    workers: int = 0,
    trial: bool = False,
) -> TextData[Windows]:
    """Read documents into training and validation windows of tokens.

    Args:
        tokenizer: its name on the Hub (`owner/name`), or its folder; as a rule the model's `path`.
        uri: a file, a folder or a pattern of .txt, .jsonl and .parquet files (`corpus.documents`). None: `DATA_URI` of
            the environment.
        field: of a line or a row, which holds its text.
        context: tokens in a window. None: the tokenizer's longest, 1024 at most.
        max_tokens: stop reading here. A cap, not a demand; four bytes of memory each.
        validation_tokens: the last of them, for validation; a sixteenth of all at most.
        revision: of the tokenizer, on the Hub.
        trial: read no more than a first batch takes, to see that it can be read.

    Documents follow one another with the tokenizer's end-of-text token in between.

    Raises ValueError when a setting is out of range, when there is no such text or tokenizer, or when there is too
    little for one batch; StoreError while a store doesn't answer.
    """
    uri = uri or os.environ.get(DATA_URI)
    if not uri:
        raise ValueError(
            f"there is no text to train on: set {DATA_URI} in the environment, or data.args.uri, to a file or a folder "
            "of .txt, .jsonl or .parquet files (file:///data/text, s3://bucket/text)"
        )
    check_sizes(context=context, batch_size=batch_size, max_tokens=max_tokens, validation_tokens=validation_tokens)
    encoder = load_tokenizer(tokenizer, revision, fetch=not trial)
    longest = int(min(encoder.model_max_length, 2**62))  # some tokenizers know none, and say 1e30
    if context is None:
        context = min(longest, _LONGEST_CONTEXT)
    elif context > longest:
        raise ValueError(f"context must be at most the tokenizer's longest, {longest}, got {context}")
    # Of which a sixteenth is a window for validation, and the rest a batch.
    enough = max(16 * (context + 1), 2 * (batch_size * context + 1)) if trial else max_tokens
    tokens = _read(encoder, uri, field, min(max_tokens, enough))
    if len(tokens) == max_tokens:
        logger.warning("%s: reading stops after %d tokens (max_tokens)", uri.partition("?")[0], max_tokens)
    cut = len(tokens) - min(validation_tokens, len(tokens) // 16)
    data = TextData(
        train=Windows(tokens[:cut], context),
        validation=Windows(tokens[cut:], context),
        batch_size=batch_size,
        workers=workers,
    )
    for name, windows in {"training": data.train, "validation": data.validation}.items():
        if len(windows) < (batch_size if name == "training" else 1):
            raise ValueError(
                f"{uri.partition('?')[0]} gives {len(windows)} {name} windows of {context} tokens: too few for a batch"
            )
    return data


def _read(encoder: Any, uri: str, field: str, most: int) -> torch.Tensor:
    """Token ids, int32, one dimension."""
    parts: list[np.ndarray] = []
    total = 0
    for batch in _batches(documents(uri, field=field), min(_BATCH_CHARACTERS, 8 * most)):
        texts = [text for text, _ in batch]
        ids = encoder(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for one, (_, ends) in zip(ids, batch, strict=True):
            if ends and encoder.eos_token_id is not None:
                one = [*one, encoder.eos_token_id]
            parts.append(np.asarray(one, dtype=np.int32))
            total += len(one)
        if total >= most:
            break
    joined = np.concatenate(parts)[:most] if parts else np.zeros(0, dtype=np.int32)
    return torch.from_numpy(joined)


def _batches(pieces: Iterator[tuple[str, bool]], characters: int) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for text, ends in pieces:
        batch.append((text, ends))
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
