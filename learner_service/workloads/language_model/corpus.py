"""A text as token numbers on disk: read once, tokenised once per machine, shared by all processes.

The text is cut into *pieces* of at most 65536 characters at line ends; every `heldout_every`-th piece is held out for
evaluation, the rest is trained on. Where the cuts fall, what is held out and what the tokenizer looks like
follow from the text alone, so that every machine that has the same text has the same corpus;
`Corpus.fingerprint` says so in two digests.

What was computed is kept in a folder of `cache_dir` whose name is a digest of the text and the settings. It
is written under another name and renamed when it is complete; a process that finds another one at work waits
for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
import xxhash

from learner_service.workload import WorkloadError
from learner_service.workloads.language_model.options import LanguageModelOptions
from learner_service.workloads.language_model.text_sources import TextSource, open_text
from learner_service.workloads.language_model.tokenizer import (
    TextTokenizer,
    byte_tokenizer,
    parse_tokenizer,
    read_tokenizer_file,
    train_bpe,
)

LAYOUT = 1
"""Changes when the files of the cache, or the rules by which they are made, change."""

PIECE_CHARACTERS_MAX = 64 << 10
PIECE_CHARACTERS_MIN = 256
PIECES_WANTED = 200
"""A small text is cut finer than `PIECE_CHARACTERS_MAX`, so that what is held out comes from all over it."""

BPE_TRAINING_CHARACTERS = 64 << 20
"""A BPE is trained on the first so many characters of the training pieces; more changes it little."""

ENCODE_BATCH_PIECES = 16

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenised text.

    Attributes:
        tokenizer: made from the text, or the user's.
        train_tokens: uint16 or uint32 [n], memory-mapped: all training pieces, each followed by the end mark.
        heldout_tokens: the same of the held-out pieces.
        heldout_bytes: uint32 [n]: bytes of UTF-8 that each held-out token stands for; 0 for the end mark.
        text_digest: xxh3_128 (hex) of all documents.
        text_bytes: bytes of UTF-8 in all documents.
    """

    tokenizer: TextTokenizer
    train_tokens: np.ndarray
    heldout_tokens: np.ndarray
    heldout_bytes: np.ndarray
    text_digest: str
    text_bytes: int

    def fingerprint(self) -> dict[str, str]:
        """Returns the digests of the text and of the tokenizer."""
        return {"text": self.text_digest, "tokenizer": self.tokenizer.digest()}


def load_corpus(options: LanguageModelOptions, cache_dir: Path) -> Corpus:
    """Returns the corpus of `options.text`; the first call on a machine tokenises it.

    Args:
        options: text, column, heldout_every, tokenizer and vocabulary_size matter.
        cache_dir: is made if it does not exist.

    Raises:
        WorkloadError: the text or the tokenizer cannot be had, or the text is empty.
    """
    source = open_text(options.text, options.column)
    text_digest, text_bytes = _digest(source)
    if not text_bytes:
        raise WorkloadError(f"workload.options.text = {options.text!r} is empty; it has to hold some text to train on.")
    own_tokenizer = None if options.tokenizer in ("bpe", "bytes") else read_tokenizer_file(options.tokenizer)
    settings = {
        "layout": LAYOUT,
        "text": text_digest,
        "heldout_every": options.heldout_every,
        "tokenizer": xxhash.xxh3_128_hexdigest(own_tokenizer) if own_tokenizer else options.tokenizer,
        "vocabulary_size": options.vocabulary_size if options.tokenizer == "bpe" else None,
        "tokenizers": tokenizers.__version__,
    }
    root = cache_dir / "language_model"
    folder = root / xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_suffix(".lock")):
            corpus = _cached(folder, text_digest, text_bytes)
            if corpus is None:
                _build(folder, source, text_bytes, options, own_tokenizer)
                corpus = _cached(folder, text_digest, text_bytes)
        if corpus is None:
            raise OSError(f"{folder} cannot be read back although it was written just now")
    except OSError as error:
        raise WorkloadError(
            f"The cache folder {cache_dir} cannot be used ({error}); choose one that this process may write to, "
            "on a disk with some space left."
        ) from error
    return corpus


def pieces(source: TextSource, text_bytes: int) -> Iterator[str]:
    """Yields the text cut into pieces: never across documents, at line ends or blanks where there are any.

    Args:
        source: the documents.
        text_bytes: bytes of all documents, from which the size of the pieces follows.
    """
    size = min(PIECE_CHARACTERS_MAX, max(PIECE_CHARACTERS_MIN, text_bytes // PIECES_WANTED))
    for document in source:
        start = 0
        while start < len(document):
            stop = start + size
            if stop < len(document):
                stop = document.rfind("\n", start, stop) + 1 or document.rfind(" ", start, stop) + 1 or stop
            yield document[start:stop]
            start = stop


def _digest(source: TextSource) -> tuple[str, int]:
    """Digest and bytes of all documents; where one ends counts, how they are spread over files does not."""
    digest, size = xxhash.xxh3_128(), 0
    for number, document in enumerate(source, start=1):
        try:
            data = document.encode("utf-8")
        except UnicodeEncodeError as error:
            raise WorkloadError(
                f"workload.options.text: document {number} holds half a surrogate pair, {document[error.start]!a}, at "
                f"character {error.start}, which no text has; correct what wrote it, or leave the document out."
            ) from error
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        size += len(data)
    return str(digest.hexdigest()), size


def _split(source: TextSource, text_bytes: int, heldout_every: int, heldout: bool) -> Iterator[str]:
    """The training pieces, or the held-out ones: the last of each `heldout_every` in a row."""
    for index, piece in enumerate(pieces(source, text_bytes)):
        if (index % heldout_every == heldout_every - 1) == heldout:
            yield piece


def _build(
    folder: Path,
    source: TextSource,
    text_bytes: int,
    options: LanguageModelOptions,
    own_tokenizer: bytes | None,
) -> None:
    """Makes tokenizer and token files under another name, then gives them theirs."""
    log.info("Tokenising %.1f MB of text, once for this machine.", text_bytes / 1e6)
    every = options.heldout_every
    tokenizer = _make_tokenizer(options, own_tokenizer, _split(source, text_bytes, every, heldout=False))
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".unfinished", dir=folder.parent))
    unfinished.chmod(0o755)
    try:
        (unfinished / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        sizes = {
            "train": _write_train(unfinished, tokenizer, _split(source, text_bytes, every, heldout=False)),
            "heldout": _write_heldout(unfinished, tokenizer, _split(source, text_bytes, every, heldout=True)),
        }
        (unfinished / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was first: possible where file locks do not exist
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _make_tokenizer(options: LanguageModelOptions, own_tokenizer: bytes | None, texts: Iterator[str]) -> TextTokenizer:
    """The tokenizer that the options ask for."""
    if own_tokenizer is not None:
        return parse_tokenizer(own_tokenizer, f"workload.options.tokenizer = {options.tokenizer!r}")
    if options.tokenizer == "bytes":
        return byte_tokenizer()
    return train_bpe(_beginning(texts, BPE_TRAINING_CHARACTERS), options.vocabulary_size)


def _beginning(texts: Iterator[str], limit: int) -> Iterator[str]:
    """The first texts of together about `limit` characters."""
    left = limit
    for text in texts:
        if left <= 0:
            return
        left -= len(text)
        yield text


def _write_train(folder: Path, tokenizer: TextTokenizer, texts: Iterator[str]) -> int:
    """Writes the training tokens and returns how many there are."""
    count = 0
    end = _end_mark(tokenizer)
    with (folder / "train.tokens").open("wb") as stream:
        while batch := list(islice(texts, ENCODE_BATCH_PIECES)):
            for tokens in tokenizer.encode(batch):
                stream.write(tokens.tobytes() + end.tobytes())
                count += len(tokens) + len(end)
    return count


def _write_heldout(folder: Path, tokenizer: TextTokenizer, texts: Iterator[str]) -> int:
    """Writes the held-out tokens with the bytes that each stands for, and returns how many there are."""
    count = 0
    end = _end_mark(tokenizer)
    with (folder / "heldout.tokens").open("wb") as stream, (folder / "heldout.bytes").open("wb") as widths:
        for text in texts:
            tokens, covered = tokenizer.encode_with_bytes(text)
            stream.write(tokens.tobytes() + end.tobytes())
            widths.write(covered.tobytes() + np.zeros(len(end), np.uint32).tobytes())
            count += len(tokens) + len(end)
    return count


def _end_mark(tokenizer: TextTokenizer) -> np.ndarray:
    """What follows a piece: one token, or nothing if the tokenizer has none for it."""
    return np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], tokenizer.dtype)


def _cached(folder: Path, text_digest: str, text_bytes: int) -> Corpus | None:
    """The corpus that lies in a folder; None if there is none or files are not as long as they should be."""
    try:
        tokenizer = parse_tokenizer((folder / "tokenizer.json").read_bytes(), str(folder / "tokenizer.json"))
        sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
        return Corpus(
            tokenizer=tokenizer,
            train_tokens=_mapped(folder / "train.tokens", tokenizer.dtype, sizes["train"]),
            heldout_tokens=_mapped(folder / "heldout.tokens", tokenizer.dtype, sizes["heldout"]),
            heldout_bytes=_mapped(folder / "heldout.bytes", np.uint32, sizes["heldout"]),
            text_digest=text_digest,
            text_bytes=text_bytes,
        )
    except (OSError, ValueError, KeyError, WorkloadError):
        return None


def _mapped(path: Path, dtype: type[np.unsignedinteger], count: int) -> np.ndarray:
    """The numbers in a file, memory-mapped; ValueError if they are not `count`."""
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} is not {count} numbers long")
    return np.memmap(path, dtype, "r") if count else np.zeros(0, dtype)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Holds a lock file, so that several processes that start together tokenise once.

    A file system without locks only costs them the same work several times.
    """
    with path.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Waiting for another process that is tokenising the same text.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            log.debug("No file locks in %s; going on without.", path.parent)
        yield
