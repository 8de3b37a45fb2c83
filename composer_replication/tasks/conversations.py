"""Conversations as a model's tokens: what chat models are fine-tuned on. Needs `transformers` and `fsspec`.

Invariant: only what an assistant says, and the end of its turn, is a label, whatever the chat template is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from composer_replication.tasks.corpus import is_text
from composer_replication.tasks.examples import Examples, Padded
from composer_replication.tasks.sizes import check_sizes
from composer_replication.tasks.sources import Source, load_tokenizer, padding_id, two_sources
from composer_replication.tasks.text import TextData

__all__ = ["PLAIN_TEMPLATE", "conversations"]

logger = logging.getLogger(__name__)

# For a tokenizer that has none: who speaks on a line, then what is said; an assistant's turn ends with end-of-text.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
_AT_ONCE = 256  # conversations that the tokenizer gets together: it works on their turns side by side
Turn = tuple[str, bool]  # its text, and is that what an assistant says?


def conversations(
    *,
    tokenizer: str,
    uri: str | None = None,
    validation_uri: str | None = None,
    dataset: str | None = None,
    config: str | None = None,
    split: str = "train",
    validation_split: str = "test",
    field: str = "messages",
    context: int = 2048,
    batch_size: int = 4,
    validation_conversations: int = 1000,
    validation_batch_size: int | None = None,
    chat_template: str | None = None,
    pad_token: str | None = None,
    revision: str | None = None,
    dataset_revision: str | None = None,
    workers: int = 0,
    trial: bool = False,
) -> TextData[Examples]:
    """Read conversations, `[{"role": ..., "content": ...}, ...]`, into examples of their own, padded batch by batch.

    Left out, and counted in the log, are conversations that are empty, whose roles aren't an optional system's and then
    user's and assistant's in turn, whose content isn't text, that the template refuses, and that have nothing an
    assistant says within `context`.

    Args:
        tokenizer: its name on the Hub (`owner/name`), or its folder.
        uri, validation_uri: files of rows, as in `corpus.documents`; or
        dataset, config, split, validation_split: a data set by its name on the Hub, through `datasets`.
        field: of a row, which holds its messages.
        context: tokens that a conversation is cut to.
        validation_conversations: the first so many valid ones.
        chat_template: Jinja, as `transformers` takes it. None: the tokenizer's own, or PLAIN_TEMPLATE. Each turn is
            tokenised by itself, as it is where a model answers.
        pad_token: what is padded with, for a tokenizer that has no padding token.
        revision, dataset_revision: of the tokenizer and of the data set, on the Hub.
        trial: read no more than a first batch of each, to see that they can be read.

    Raises ValueError when a setting is out of range, when there is no such tokenizer or data, and, with file and row,
    for data of another format; StoreError while a store or the Hub doesn't answer.
    """
    held_batch = batch_size if validation_batch_size is None else validation_batch_size
    check_sizes(
        batch_size=batch_size, validation_batch_size=held_batch, validation_conversations=validation_conversations
    )
    check_sizes(2, context=context)
    check_sizes(0, workers=workers)
    train, held = two_sources(
        (uri, split), (validation_uri, validation_split), dataset, config=config, field=field, revision=dataset_revision
    )
    encoder = load_tokenizer(tokenizer, revision, fetch=not trial)
    token = padding_id(encoder, tokenizer, pad_token)
    template = chat_template or encoder.chat_template or PLAIN_TEMPLATE
    most = min(validation_conversations, held_batch) if trial else validation_conversations
    data = TextData(
        train=_read(train, encoder, template, context, batch_size if trial else None),
        validation=_read(held, encoder, template, context, most),
        batch_size=batch_size,
        workers=workers,
        collate=Padded(token),
        validation_batch_size=held_batch,
    )
    if len(data.train) < batch_size:
        raise ValueError(f"{train} gives {len(data.train)} valid conversations: too few for a batch of {batch_size}")
    return data


def _read(source: Source, encoder: Any, template: str, context: int, most: int | None) -> Examples:
    dropped: Counter[str] = Counter()
    examples = Examples(islice(_examples(source, encoder, template, context, dropped), most))
    reasons = ", ".join(f"{count} {why}" for why, count in dropped.most_common())
    if not len(examples):
        raise ValueError(f"{source} gives no valid conversation ({reasons or 'it is empty'})")
    log = logger.warning if dropped else logger.info
    words = f"; left out: {reasons}" if dropped else ""
    log(
        "%s: %d conversations, %d tokens, %d targets%s", source, len(examples), examples.tokens, examples.targets, words
    )
    return examples


def _examples(
    source: Source, encoder: Any, template: str, context: int, dropped: Counter[str]
) -> Iterator[tuple[list[int], list[bool]]]:
    found = _valid(source, encoder, template, dropped)
    while some := list(islice(found, _AT_ONCE)):
        texts = [text for turns in some for text, _ in turns]
        ids = iter(encoder(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])
        for turns in some:
            tokens: list[int] = []
            targets: list[bool] = []
            for _, spoken in turns:
                part = next(ids)
                tokens += part
                targets += [spoken] * len(part)
            if any(targets[1:context]):
                yield tokens[:context], targets[:context]
            else:
                dropped["without an assistant's word within the context"] += 1


def _valid(source: Source, encoder: Any, template: str, dropped: Counter[str]) -> Iterator[list[Turn]]:
    from jinja2 import TemplateError

    for where, messages in source.rows():
        why = _why_not(messages, where, source.field)
        if not why:
            try:
                yield _turns(encoder, template, messages, where)
                continue
            except TemplateError:
                why = "refused by the chat template"
        dropped[why] += 1


def _why_not(messages: Any, where: str, field: str) -> str:
    """Why this is no conversation to train on; "" if it is one. Raises ValueError if it's something else altogether."""
    if messages is None:
        return "empty"
    if not isinstance(messages, list):
        raise ValueError(f"{where}: the field {field!r} must be a list of messages, not {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            has = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
            raise ValueError(f"{where}: message {index + 1} has no 'role' and 'content' (it has {has})")
    if not messages:
        return "empty"
    roles = [message["role"] for message in messages]
    spoken = roles[1:] if roles[0] == "system" else roles
    if not spoken or any(role != ("user", "assistant")[index % 2] for index, role in enumerate(spoken)):
        return "with roles out of order"
    if not all(is_text(message["content"]) and message["content"].strip() for message in messages):
        return "with content that isn't text"
    if len(spoken) < 2:
        return "without an assistant"
    return ""


def _turns(encoder: Any, template: str, messages: list[Mapping[str, Any]], where: str) -> list[Turn]:
    """A conversation's text, in pieces, up to the end of the last answer."""

    def text(count: int, *, asks: bool) -> str:
        some = list(messages[:count])
        return encoder.apply_chat_template(some, chat_template=template, tokenize=False, add_generation_prompt=asks)

    found: list[Turn] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = text(index, asks=True), text(index + 1, asks=False)
        if not (asked.startswith(done) and answered.startswith(asked)):
            raise ValueError(
                f"{where}: the chat template doesn't write message {index + 1} behind those before it and its prompt "
                "for an answer, so that nobody can tell where the answer begins: give another one (chat_template)"
            )
        found += [(asked[len(done) :], False), (answered[len(asked) :], True)]
        done = answered
    return found
