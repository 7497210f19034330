"""Text to token ids and ids to bytes, for one model, from GGUF metadata or tokenizer.json.

Owns how pre-tokenizer kinds map to splitting rules, special tokens and the chat template's place.
Knows nothing of requests. Reads no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from runtime.errors import ModelError, RequestError
from runtime.front.chat_template import ChatTemplate
from runtime.front.gguf_metadata import GgufValue, read_gguf_metadata

Encoding = Literal["byte_level", "sentencepiece"]
"""How a token's text stands for bytes: GPT-2's printable alphabet, or `▁` and `<0xNN>`."""

# tokenizer.ggml.pre -> how text is split before the merges. Names as llama.cpp writes them.
_GPT2 = frozenset({"default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"})
_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_REGEX_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """One model's tokenizer. Its methods are pure and safe from any thread."""

    def __init__(
        self,
        backend: Backend,
        encoding: Encoding,
        *,
        bos: str | None = None,
        eos: str | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._encoding = encoding
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._bos_id = backend.token_to_id(bos) if bos is not None else None
        self._add_bos = add_bos and self._bos_id is not None
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(i for i, t in self._added.items() if t.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._chat = (
            ChatTemplate(chat_template, bos_token=bos or "", eos_token=eos or "")
            if chat_template
            else None
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special` adds what the model wants around a plain prompt (a BOS token, for some)."""
        # `encode` would hold the GIL: a long prompt would stop every stream of this process.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        if special and self._add_bos and ids[:1] != [self._bos_id]:
            assert self._bos_id is not None
            ids = [self._bos_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The conversation through the chat template, which writes its own special tokens."""
        if self._chat is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        return self.encode(self._chat.render(messages), special=False)

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the output. Empty for ids beyond the vocabulary (padding)."""
        cached = self._bytes.get(token)
        if cached is None:
            cached = self._bytes[token] = self._spell(token)
        return cached

    def token_text(self, token: int) -> str:
        """The token alone, for logprobs; bytes that are no character alone show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        kept = (t for t in tokens if not (skip_special and t in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def _spell(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return str(added.content).encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._encoding == "byte_level":
            if all(c in _BYTES for c in piece):
                return bytes(_BYTES[c] for c in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def load_tokenizer(path: Path) -> Tokenizer:
    """From a .gguf file or a Hugging Face folder. Raises ModelError naming what is missing."""
    if path.is_dir():
        return _from_folder(path)
    return _from_gguf(path, read_gguf_metadata(path))


# ---- GGUF ---------------------------------------------------------------------------------------


def _from_gguf(path: Path, metadata: Mapping[str, GgufValue]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"model {path}: tokenizer kind {kind!r} is not supported in GGUF files (gpt2 is)",
            hint="use the model's Hugging Face folder, with its tokenizer.json",
        )
    tokens, merges = _strings(path, metadata, "tokens"), _strings(path, metadata, "merges")
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    try:
        backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))  # type: ignore[arg-type]
    except (
        Exception
    ) as e:  # the tokenizers library raises bare Exception; this is the edge that meets it
        raise ModelError(f"model {path}: its tokenizer does not load: {e}") from e
    _set_splitting(path, backend, str(metadata.get("tokenizer.ggml.pre", "default")))
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, list):
        _add_special(backend, tokens, types)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        "byte_level",
        bos=_token_at(tokens, metadata.get("tokenizer.ggml.bos_token_id")),
        eos=_token_at(tokens, metadata.get("tokenizer.ggml.eos_token_id")),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token") is True,
        chat_template=template if isinstance(template, str) else None,
    )


def _strings(path: Path, metadata: Mapping[str, GgufValue], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise ModelError(f"model {path}: its metadata has no tokenizer.ggml.{key}")
    return [str(v) for v in value]


def _token_at(tokens: Sequence[str], index: GgufValue | None) -> str | None:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _set_splitting(path: Path, backend: Backend, kind: str) -> None:
    if kind in _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind in _DIGITS_THEN_GPT2:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif kind in _REGEX_SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_REGEX_SPLITS[kind]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        # A guess would give slightly wrong tokens, which nobody would notice.
        raise ModelError(
            f"model {path}: pre-tokenizer kind {kind!r} is not known",
            hint="use the model's Hugging Face folder, with its tokenizer.json",
        )
    if kind in _NFC:
        backend.normalizer = normalizers.NFC()


def _add_special(backend: Backend, tokens: Sequence[str], types: Sequence[GgufValue]) -> None:
    """Tokens that are matched whole in the text, before it is split."""
    control = [t for t, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    defined = [t for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in defined])


# ---- Hugging Face folder ------------------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"model {folder}: it has no tokenizer.json")
    try:
        backend = Backend.from_file(str(file))
    except (
        Exception
    ) as e:  # the tokenizers library raises bare Exception; this is the edge that meets it
        raise ModelError(f"model {file}: does not load: {e}") from e
    config = _json(folder / "tokenizer_config.json")
    separate = folder / "chat_template.jinja"
    template = separate.read_text() if separate.exists() else config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    bos, eos = _named(config.get("bos_token")), _named(config.get("eos_token"))
    return Tokenizer(
        backend,
        _encoding_of(file),
        bos=bos,
        eos=eos,
        # Files without a post-processor leave the BOS to their configuration.
        add_bos=config.get("add_bos_token") is True and backend.post_processor is None,
        chat_template=template,
    )


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as e:
        raise ModelError(f"model {file}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"model {file}: not a JSON object")
    return value


def _named(token: object) -> str | None:
    """A special token in tokenizer_config.json: a string, or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _encoding_of(file: Path) -> Encoding:
    decoder = json.dumps(_json(file).get("decoder"))
    if '"ByteLevel"' in decoder:
        return "byte_level"
    if '"ByteFallback"' in decoder or '"Metaspace"' in decoder:
        return "sentencepiece"
    raise ModelError(f"model {file}: its decoder is neither byte-level nor SentencePiece")
