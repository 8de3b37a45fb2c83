"""Conversations: which are trained on, where the labels are, what is padded and counted, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.adapter.tokens import count_tokens
from composer_replication.tasks.conversations import PLAIN_TEMPLATE, conversations
from composer_replication.tasks.next_token import IGNORED, target_count
from tests.support.language_model import save_language_model
from tests.support.rows import conversation, write_rows

pytest.importorskip("fsspec")
END = "<|end|>"
CHAT_ML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
CHAT_ML += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_language_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def read(model: str, rows: list[dict[str, Any]], folder: Path, *, name: str = "train.jsonl", **settings: Any) -> Any:
    uri = str(write_rows(folder / name, rows))
    given = {"context": 200, "batch_size": 1, "pad_token": END, "validation_uri": uri}
    return conversations(tokenizer=model, uri=uri, **{**given, **settings})


def targets(tokenizer: Any, example: dict[str, torch.Tensor]) -> str:
    return tokenizer.decode([token for token in example["labels"].tolist() if token != IGNORED])


def test_what_the_assistant_says_is_all_that_is_a_label(model: str, tokenizer: Any, tmp_path: Path) -> None:
    data = read(model, [conversation("Hi", "Yes?", "Bye", "Ok.", "unanswered")], tmp_path)
    example = data.train[0]
    text = f"user:\nHi\nassistant:\nYes?{END}user:\nBye\nassistant:\nOk.{END}"
    assert tokenizer.decode(example["input_ids"].tolist()) == text  # nothing comes behind the last answer
    assert targets(tokenizer, example) == f"Yes?{END}Ok.{END}"
    # Each label is the token that follows.
    ids, labels = example["input_ids"], example["labels"]
    assert all(label in (IGNORED, after) for label, after in zip(labels[:-1].tolist(), ids[1:].tolist(), strict=True))
    assert labels[-1] == IGNORED
    first = text.index("Yes?")
    assert labels[first - 1] == ids[first] and labels[first - 2] == IGNORED


def test_a_template_without_markers_of_generation_gives_the_same_spans(
    model: str, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [conversation("Hi", "Yes?", "Bye", "Ok.", system="Be short")]
    example = read(model, rows, tmp_path, chat_template=CHAT_ML).train[0]
    text = "<system>Be short</s><user>Hi</s><assistant>Yes?</s><user>Bye</s><assistant>Ok.</s>"
    assert tokenizer.decode(example["input_ids"].tolist()) == text
    assert targets(tokenizer, example) == "Yes?</s>Ok.</s>"
    own = save_language_model(tmp_path / "own")
    config = own / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": CHAT_ML}))
    assert torch.equal(read(str(own), rows, tmp_path).train[0]["input_ids"], example["input_ids"])


def test_what_cannot_be_trained_on_is_left_out_and_counted(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    rows: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": None},
        {"messages": [assistant, user]},
        {"messages": [user, user, assistant]},
        {"messages": [{"role": "system", "content": "x"}]},
        conversation("Hi", None),
        conversation("Hi", " \n"),
        conversation(["Hi"], "Yes"),
        conversation("Hi"),
        conversation("a" * 100, "too late"),
        conversation("Hi", "Yes?"),
    ]
    data = read(model, rows, tmp_path, context=100, name="train.json")
    assert len(data.train) == 1 and target_count(data.train[0]["labels"]) == len("Yes?") + 1
    for words in (
        "train.json: 1 conversations, 25 tokens, 5 targets; left out:",
        "3 with content that isn't text",
        "3 with roles out of order",
        "2 empty",
        "1 without an assistant,",
        "1 without an assistant's word within the context",
    ):
        assert words in caplog.text
    refuses = "{{ raise_exception('no') if messages[0].content == 'Hi' }}" + PLAIN_TEMPLATE
    more = [conversation("Hi", "Yes?"), conversation("Ho", "Yes?")]
    assert len(read(model, more, tmp_path, chat_template=refuses).train) == 1
    assert "1 refused by the chat template" in caplog.text
    with pytest.raises(ValueError, match=r"train.jsonl gives no valid conversation \(1 without an assistant\)"):
        read(model, [conversation("Hi")], tmp_path)


def test_long_ones_are_cut_and_keep_what_labels_are_left(model: str, tokenizer: Any, tmp_path: Path) -> None:
    example = read(model, [conversation("Hi", "Yes, certainly")], tmp_path, context=24).train[0]
    assert len(example["input_ids"]) == 24 and example["labels"][-1] == IGNORED
    assert targets(tokenizer, example) == "Yes,"


def test_a_batch_is_padded_to_its_longest_and_only_what_isn_t_padding_counts(
    model: str, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [conversation("Hi", "y" * n) for n in (1, 9, 4, 2, 30)]
    data = read(model, rows, tmp_path, batch_size=2, validation_batch_size=5, name="rows.parquet")
    lengths = [len(data.train[i]["input_ids"]) for i in range(len(rows))]
    batches = list(data.train_dataloader())
    assert len(batches) == 2  # the last one, of one conversation, is dropped
    for batch in batches:
        mask = batch["attention_mask"]
        own = mask.sum(1).tolist()
        assert batch["input_ids"].shape[1] == max(own) and set(own) <= set(lengths)
        assert int(count_tokens(batch)) == int(mask.sum())
        assert (batch["input_ids"][mask == 0] == tokenizer.convert_tokens_to_ids(END)).all()
        assert (batch["labels"][mask == 0] == IGNORED).all()
    (whole,) = data.val_dataloader()  # validation's batches have a size of their own
    assert int(count_tokens(whole)) == sum(lengths) == data.train.tokens
    usual = read(model, rows, tmp_path, batch_size=2, name="rows.parquet")
    assert [len(batch["labels"]) for batch in usual.val_dataloader()] == [2, 2, 1]


def test_padding_changes_no_loss(model: str, tmp_path: Path) -> None:
    """The model isn't told what is padding: at the right, no earlier position sees it."""
    from composer_replication.tasks.causal_lm import causal_lm
    from composer_replication.tasks.next_token import logits_of, next_token_loss

    data = read(model, [conversation("a", "b" * n) for n in (1, 8)], tmp_path, context=32)
    lm = causal_lm(path=model).eval()
    alone = [data.train[0], data.train[1]]
    batch = data.collate(alone)
    with torch.no_grad():
        logits, masked = logits_of(lm, batch), lm(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        parts = [lm(one["input_ids"][None]).logits[0] for one in alone]
    for row, (one, expected) in enumerate(zip(alone, parts, strict=True)):
        length = len(one["input_ids"])
        # Other shapes are added up in another order.
        torch.testing.assert_close(logits[row, :length], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(masked[row, :length], expected, rtol=1e-5, atol=1e-6)
    # By hand: what each target costs, over the number of targets.
    losses = [
        -parts[row].log_softmax(-1)[position, label]
        for row, one in enumerate(alone)
        for position, label in enumerate(one["labels"].tolist())
        if label != IGNORED
    ]
    assert len(losses) == target_count(batch["labels"]) == (1 + 1) + (8 + 1)
    torch.testing.assert_close(next_token_loss(logits, batch["labels"]), torch.stack(losses).mean())


def test_files_of_every_kind_hold_the_same(model: str, tmp_path: Path) -> None:
    rows = [conversation("Hi", f"Answer {i}") for i in range(3)]
    kinds = [read(model, rows, tmp_path / name, name=f"a.{name}") for name in ("jsonl", "json", "parquet")]
    packed = tmp_path / "a.json.gz"  # JSON lines under this name, as C4's files are
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    kinds.append(
        conversations(tokenizer=model, uri=str(packed), validation_uri=str(packed), batch_size=1, pad_token=END)
    )
    firsts = [[one["input_ids"].tolist() for one in data.train] for data in kinds]
    assert firsts[0] == firsts[1] == firsts[2] == firsts[3] and len(firsts[0]) == 3


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("a.jsonl", [{"messages": []}, {"text": "x"}], r"a.jsonl, line 2 has no field 'messages' \(it has text\)"),
        (
            "a.jsonl",
            [conversation("x", "y"), {"messages": "x"}],
            "line 2: the field 'messages' must be a list",
        ),
        (
            "a.json",
            [{"messages": [{"from": "human"}]}],
            r"item 1: message 1 has no 'role' and.*it has from",
        ),
        ("a.json", [{"messages": ["x"]}], r"item 1: message 1 has no 'role' and.*it has str"),
        ("a.parquet", [{"messages": ["x"]}], "a.parquet, row 1: message 1 has no 'role'"),
        ("a.parquet", [{"text": "x"}], "a.parquet has no column 'messages'"),
    ],
)
def test_another_format_is_refused_with_its_row(
    model: str, tmp_path: Path, name: str, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(model, rows, tmp_path, name=name)


def test_a_file_that_isn_t_what_its_name_says(model: str, tmp_path: Path) -> None:
    for name, content, message in (
        ("a.parquet", b"no parquet", "a.parquet isn't a Parquet file"),
        ("a.json", b"[{", "a.json isn't JSON"),
        ("a.txt", b"Hi", "is plain text, which has no rows"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            conversations(tokenizer=model, uri=str(path), validation_uri=str(path), pad_token=END)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_token": None}, "pad_token is missing.*no padding token.*its end-of-text token '<.end.>'"),
        ({"pad_token": "<none>"}, "pad_token must be a token of .*, not '<none>'"),
        ({"context": 1}, "context must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 2}, "gives 1 valid conversations: too few for a batch of 2"),
        ({"dataset": "me/data"}, r"give uri \(files\) or dataset \(a name on the Hub\), not both"),
        ({"chat_template": "{{ messages[-1].content }}"}, "line 1: the chat template doesn't write message 2 behind"),
    ],
)
def test_bad_settings_are_named(model: str, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(model, [conversation("Hi", "Yes")], tmp_path, **settings)


def test_a_data_set_by_name_goes_through_datasets(model: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [conversation("Hi", f"Answer {i}") for i in range(3)]
    write_rows(tmp_path / "set" / "train_sft.parquet", rows)
    given = {"tokenizer": model, "pad_token": END, "batch_size": 1}
    found = conversations(dataset=str(tmp_path / "set"), split="train", validation_split="train", **given)
    plain = read(model, rows, tmp_path)
    assert [one["input_ids"].tolist() for one in found.train] == [one["input_ids"].tolist() for one in plain.train]
    with pytest.raises(ValueError, match="nowhere' can't be loaded"):
        conversations(dataset=str(tmp_path / "nowhere"), **given)
    with pytest.raises(ValueError, match="the data set .*set' can't be loaded.*test"):
        conversations(dataset=str(tmp_path / "set"), split="test", **given)
