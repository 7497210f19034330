"""Tokenization: equal to transformers on the default model, and what folders and GGUF files may
lack."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ModelError, RequestError
from runtime.front.gguf_metadata import read_gguf_metadata
from runtime.front.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "It's 1234567 o'clock; they'll say we've 3.14 left.",
    "tabs\tand\r\nnew\n\n\nlines   and   runs",
    "Zürich, naïve café, ÅÄÖ, ß",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "🎉👩‍👩‍👧‍👦🇪🇺 emoji",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x01\x7f\u200b\ufeff",
    "a" * 500 + " " * 30 + "b",
]


@pytest.fixture(scope="module")
def model(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)


@pytest.mark.model
def test_default_model_equals_transformers(model: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        ids = model.encode(text)
        assert ids == reference(text).input_ids, text
        assert model.decode(ids, skip_special=False) == text


@pytest.mark.model
@settings(deadline=None, max_examples=150)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Nd", "Nl", "No"]), max_size=80))
def test_default_model_equals_transformers_on_any_text(
    model: Tokenizer, reference: Any, text: str
) -> None:
    # Without digits: transformers' conversion of GGUF loses this model's splitting of them.
    ids = model.encode(text)
    assert ids == reference(text).input_ids
    # Not always `text`: this vocabulary has no token for some bytes, such as 0xF1.
    assert model.decode(ids, skip_special=False) == reference.decode(ids)


@pytest.mark.model
def test_default_model_splits_digits_before_spaces_are_grouped(model: Tokenizer) -> None:
    # What the model's own tokenizer.json says: Digits(individual), then the GPT-2 rule.
    pieces = [model.token_text(t) for t in model.encode("x   12")]
    assert pieces == ["x", "   ", "1", "2"]


@pytest.mark.model
def test_chat_template_equals_transformers(model: Tokenizer, reference: Any) -> None:
    conversations = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": " a\n"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "<|im_end|> c"},
        ],
    ]
    for messages in conversations:
        text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = reference(text, add_special_tokens=False).input_ids
        assert model.encode_chat(messages) == expected


@pytest.mark.model
def test_default_model_special_tokens(model: Tokenizer) -> None:
    assert {0, 1, 2} <= model.special_ids and model.vocab_size == 49152
    assert model.decode([1, 4093, 2]) == "user"


# ---- folders ------------------------------------------------------------------------------------


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_folder_round_trips(byte_model: Path, text: str) -> None:
    tokenizer = load_tokenizer(byte_model)
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_other_threads_run_while_a_long_text_is_encoded(byte_model: Path) -> None:
    tokenizer = load_tokenizer(byte_model)
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        before = ticks
        tokenizer.encode("word " * 100_000)
        assert ticks - before >= 10
    finally:
        done.set()
        ticker.join()


def test_folder_special_and_added_tokens(byte_model: Path) -> None:
    tokenizer = load_tokenizer(byte_model)
    assert tokenizer.encode("a<s><think>") == [97, 256, 258]
    assert tokenizer.special_ids == {256, 257}, "a plain added token is text"
    assert tokenizer.token_bytes(258) == b"<think>" and tokenizer.token_bytes(9999) == b""


def changed(byte_model: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(byte_model, folder, dirs_exist_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def test_bos_is_added_to_plain_prompts_only(byte_model: Path, tmp_path: Path) -> None:
    folder = changed(byte_model, tmp_path, add_bos_token=True, chat_template="{{ bos_token }}x")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a") == [256, 97]
    assert tokenizer.encode("<s>a") == [256, 97], "not twice"
    assert tokenizer.encode_chat([{"role": "user", "content": ""}]) == [256, ord("x")]


def test_template_that_refuses_is_the_clients_fault(byte_model: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(changed(byte_model, tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_template_is_in_a_sandbox(byte_model: Path, tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(changed(byte_model, tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_template_dialect(byte_model: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = load_tokenizer(changed(byte_model, tmp_path, chat_template=template))
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}]
    ids = tokenizer.encode_chat(messages)
    assert bytes(ids).decode() == '{"role": "user", "content": "<é>"}4'


def test_a_model_without_template_says_so(byte_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(changed(byte_model, tmp_path, chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_sentencepiece_style_folder(byte_model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    vocab = {"<unk>": 0, "▁": 1, "h": 2, "i": 3, "▁h": 4, "▁hi": 5}
    vocab |= {f"<0x{b:02X}>": 6 + b for b in range(256)}
    merges = [("▁", "h"), ("▁h", "i")]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("hi é")
    assert ids == [5, 1, 6 + 0xC3, 6 + 0xA9]
    assert tokenizer.decode(ids) == " hi é"


def test_broken_folders(byte_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="does not load"):
        load_tokenizer(tmp_path)
    changed(byte_model, tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelError, match="does not compile"):
        load_tokenizer(tmp_path)


# ---- GGUF ---------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(path: Path, **metadata: Any) -> Path:
    """A GGUF file with metadata only; `__` in a keyword stands for a dot."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(metadata))
    for key, value in metadata.items():
        out += string(key.replace("__", "."))
        match value:
            case bool():
                out += struct.pack("<I?", 7, value)
            case int():
                out += struct.pack("<II", 4, value)
            case str():
                out += struct.pack("<I", 8) + string(value)
            case [str(), *_]:
                out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
            case [int(), *_]:
                out += struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    path.write_bytes(out)
    return path


def tokens_of(alphabet: list[str]) -> dict[str, Any]:
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__tokens": [*alphabet, "12", "123", "Ġa", "<s>"],
        "tokenizer__ggml__merges": ["1 2", "12 3", "Ġ a"],
        "tokenizer__ggml__token_type": [1] * 259 + [3],
        "tokenizer__ggml__bos_token_id": 259,
        "tokenizer__ggml__add_bos_token": True,
    }


@pytest.fixture
def alphabet(byte_model: Path) -> list[str]:
    vocab = json.loads((byte_model / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocab, key=vocab.__getitem__)


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("default", "1234 a", ["123", "4", " a"]),
        ("smollm", "1234 a", ["1", "2", "3", "4", " a"]),
        ("llama-bpe", "1234 a", ["123", "4", " a"]),
        ("qwen2", "1234 a", ["1", "2", "3", "4", " a"]),
        ("default", "  12", [" ", " ", "12"]),
        ("smollm", "  12", [" ", " ", "1", "2"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
    ],
)
def test_gguf_pre_tokenizers(
    alphabet: list[str], tmp_path: Path, kind: str, text: str, pieces: list[str]
) -> None:
    path = gguf(tmp_path / "m.gguf", **tokens_of(alphabet), tokenizer__ggml__pre=kind)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(text)
    assert ids[0] == 259, "BOS"
    assert [tokenizer.token_bytes(t).decode("latin-1") for t in ids[1:]] == pieces


def test_gguf_that_cannot_be_served(alphabet: list[str], tmp_path: Path) -> None:
    path, good = tmp_path / "m.gguf", tokens_of(alphabet)
    for change, words in [
        ({"tokenizer__ggml__pre": "martian"}, "martian"),
        ({"tokenizer__ggml__model": "t5"}, "t5"),
        ({"tokenizer__ggml__merges": "none"}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__merges": ["x yz"]}, "does not load"),
    ]:
        with pytest.raises(ModelError, match=words):
            load_tokenizer(gguf(path, **(good | change)))


def test_every_truncation_of_metadata_is_noticed(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", a="text", b=[1, 2, 3], c=["x", "yy"], d=7, e=True)
    raw = path.read_bytes()
    assert read_gguf_metadata(path) == {
        "a": "text",
        "b": [1, 2, 3],
        "c": ["x", "yy"],
        "d": 7,
        "e": True,
    }
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(ModelError, match=r"truncated|not a GGUF"):
            read_gguf_metadata(path)


def test_what_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="No such file"):
        load_tokenizer(path)
    path.write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ModelError, match="not a GGUF"):
        load_tokenizer(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(ModelError, match="version 1"):
        load_tokenizer(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("k") + struct.pack("<I", 99))
    with pytest.raises(ModelError, match="type 99"):
        load_tokenizer(path)
