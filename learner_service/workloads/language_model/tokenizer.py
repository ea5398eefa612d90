"""From text to token numbers and back, with the bytes of text that each token stands for.

All three kinds are Hugging Face `tokenizers` objects: a byte-level BPE that is trained here, the same without
merges (bytes as they are), or the user's own tokenizer.json. So all of them export as tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import fsspec
import numpy as np
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers, trainers

from learner_service.workload import WorkloadError

END_OF_TEXT = "<|endoftext|>"
"""Between pieces of text; number 0 of the tokenizers that are made here."""

END_OF_TEXT_CANDIDATES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""What a user's tokenizer may call it; the first that it has is used, else pieces follow without a mark."""

BYTES_VOCABULARY_SIZE = 257


class TextTokenizer:
    """A tokenizer of the `tokenizers` package, reduced to what training on text needs.

    Args:
        tokenizer: the object; its encoding must be a function of the text alone.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.vocabulary_size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        ends = (tokenizer.token_to_id(name) for name in END_OF_TEXT_CANDIDATES)
        self.end_of_text: int | None = next((end for end in ends if end is not None), None)

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """Smallest unsigned type that holds every token number."""
        return np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token numbers of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns token numbers and, for each, how many more bytes of the text's UTF-8 are covered after it.

        The sum is the length of the text exactly, also where a tokenizer splits a character, drops blanks or
        normalises: what no token covers counts for the next one, at the end for the last one.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if not encoding.ids:
            return np.zeros(0, self.dtype), np.zeros(0, np.uint32)
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
        bytes_before = np.concatenate([[0], np.cumsum(widths)])
        ends = np.maximum.accumulate(np.array([end for _, end in encoding.offsets]))
        ends[-1] = len(code_points)
        return np.array(encoding.ids, self.dtype), np.diff(bytes_before[ends], prepend=0).astype(np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token numbers; numbers that stand for no token are left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def to_json(self) -> str:
        """Returns the contents of tokenizer.json."""
        return str(self._tokenizer.to_str(pretty=True))

    def digest(self) -> str:
        """Returns xxh3_128 (hex) of the tokenizer's canonical JSON: the same exactly where text maps alike."""
        canonical = json.dumps(json.loads(self._tokenizer.to_str()), sort_keys=True, ensure_ascii=True)
        return xxhash.xxh3_128_hexdigest(canonical.encode())


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> TextTokenizer:
    """Trains a byte-level BPE; the same texts give the same tokenizer on every machine.

    Args:
        texts: what to train on.
        vocabulary_size: entries wanted, >= 257: the end mark, 256 bytes, merges. Little text may yield fewer
            merges.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer)


def byte_tokenizer() -> TextTokenizer:
    """Returns the tokenizer whose tokens are the 256 bytes and the end mark."""
    return train_bpe([], BYTES_VOCABULARY_SIZE)


def parse_tokenizer(contents: bytes, where: str) -> TextTokenizer:
    """Returns the tokenizer of a tokenizer.json.

    Args:
        contents: of the file.
        where: the setting or file, for the message.

    Raises:
        WorkloadError: it is none.
    """
    try:
        return TextTokenizer(tokenizers.Tokenizer.from_str(contents.decode("utf-8")))
    except Exception as error:  # the package raises plain Exception
        raise WorkloadError(
            f"{where} is not a Hugging Face tokenizer.json ({' '.join(str(error).split())}); give the "
            "tokenizer.json that `tokenizers` or `transformers` saved."
        ) from error


def read_tokenizer_file(name: str) -> bytes:
    """Returns the contents of the file that `workload.options.tokenizer` names (path or fsspec URL).

    Raises:
        WorkloadError: it cannot be read.
    """
    try:
        with fsspec.open(name, "rb") as stream:
            return bytes(stream.read())
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise WorkloadError(
            f"workload.options.tokenizer = {name!r} cannot be read ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); give 'bpe', 'bytes', or the path or fsspec URL of a Hugging "
            "Face tokenizer.json."
        ) from error
