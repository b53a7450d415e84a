"""Conversations: the text and tokens that the library gives, and of them what the assistant says is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workers.data import chat, tokens
from workers.data.chat import CHATML, Template
from workers.data.reading import Reading
from workers.data.text import DataError
from workers.spec import IGNORED, DataSpec

pytestmark = pytest.mark.torch

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est 東京?"},
    {"role": "assistant", "content": "In Japan 🗾."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": ""},
]
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as the library saves it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["In Japan it is brief. And then where?"], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = MARKED
    fast.save_pretrained(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def spoken(template: Template, messages: list[dict[str, str]]) -> list[str]:
    whole, spans = template.spans(messages, "here")
    return [whole[first:end] for first, end in spans]


def test_ids_and_what_is_learned_are_the_librarys(folder: Path) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs = fast.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    template = Template.of("auto", str(folder / "tokenizer.json"))
    whole, spans = template.spans(TALK, "here")
    assert whole == fast.apply_chat_template(TALK, tokenize=False)
    ids, at = tokens.File(str(folder / "tokenizer.json")).placed(whole)
    assert ids.tolist() == theirs["input_ids"]
    learned = chat._inside(at, spans)
    assert learned.tolist() == [bool(one) for one in theirs["assistant_masks"]]
    assert fast.decode(ids[learned]) == "In Japan 🗾.</s></s>"


def test_chatml_of_bytes() -> None:
    assert spoken(Template(CHATML), TALK) == ["In Japan 🗾.<|im_end|>\n", "<|im_end|>\n"]
    whole, spans = Template(CHATML).spans(TALK, "here")
    ids, at = tokens.Bytes().placed(whole)
    assert bytes(ids[chat._inside(at, spans)].tolist()).decode() == "In Japan 🗾.<|im_end|>\n<|im_end|>\n"


def test_a_sample_learns_what_the_assistant_says_and_reads_the_rest(tmp_path: Path) -> None:
    rows = [
        {"messages": TALK},
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"prompt": "Who?", "completion": "Me.", "system": "Be kind."},
    ]
    data = DataSpec(source=write(tmp_path / "talks.jsonl", rows), format="chat", packing="documents")
    reading = Reading(data, 512, 0)
    inputs, targets, starts = reading.rows(0, reading.size)
    learned = bytes(targets[targets != IGNORED].tolist()).decode()
    assert learned == "In Japan 🗾.<|im_end|>\n<|im_end|>\n3<|im_end|>\nMe.<|im_end|>\n"
    assert starts is not None
    assert len(set(starts[0][targets[0] != IGNORED].tolist())) == 3  # each conversation alone
    read = bytes(inputs[0].tolist()).decode(errors="replace")
    assert "<|im_start|>user\nAdd.\n\n1 and 2<|im_end|>" in read
    assert "<|im_start|>system\nBe kind.<|im_end|>" in read


def test_parquet_and_another_field(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"talk": TALK, "n": 1}]), tmp_path / "talks.parquet")
    source = str(tmp_path / "talks.parquet")
    ((ids, learned),) = chat.encoded(source, "talk", Template(CHATML), tokens.Bytes())
    assert bytes(ids.tolist()).decode() == Template(CHATML).render(TALK)
    assert learned.sum() > 0


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "hello"}, ":1 has no conversation: messages of role and content, or instruction"),
        ({"messages": []}, "its fields are messages"),
        ({"messages": [{"role": "user"}]}, "has no conversation"),
        ({"messages": TALK[:2]}, "the assistant says nothing in it"),
    ],
)
def test_rows_that_are_no_conversation(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        chat.encoded(write(tmp_path / "a.jsonl", [row]), "text", Template(CHATML), tokens.Bytes())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "mine is no template"),
        ("{{ raise_exception('no system') }}", "here: template mine does not take it: no system"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "renders earlier messages otherwise",
        ),
        ("{{ ''.__class__.__mro__ }}", "does not take it"),
    ],
)
def test_templates_that_can_not_be_used(source: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Template(source, "mine").spans(TALK, "here")


@pytest.mark.parametrize("name", ["/no/such.jinja", "no_template.json"])
def test_a_template_that_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "no_template.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.template"):
        Template.of(str(tmp_path / name), "byte")


def test_conversations_are_read_alone() -> None:
    with pytest.raises(ValueError, match="format chat needs packing documents"):
        DataSpec(source="a.jsonl", format="chat")
