"""From text to token numbers: the same on every machine, once per machine, every byte counted."""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest

from learner_service.workload import WorkloadError
from learner_service.workloads.language_model import corpus as corpus_module
from learner_service.workloads.language_model.corpus import Corpus, load_corpus, pieces
from learner_service.workloads.language_model.options import LanguageModelOptions
from learner_service.workloads.language_model.tokenizer import END_OF_TEXT, TextTokenizer, byte_tokenizer, train_bpe

WORDS = ["senate", "house", "peace", "treasury", "Größe", "naïve", "öffentlich", "日本", "the", "of", "and", "1862"]


def prose(seed: int, word_count: int) -> str:
    choose = random.Random(seed)
    words = (choose.choice(WORDS) + (".\n" if choose.random() < 0.1 else " ") for _ in range(word_count))
    return "".join(words)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "speech.txt"
    path.write_text(prose(1, 6000))
    return path


def load(text_file: Path, cache_dir: Path, **options: object) -> Corpus:
    values = {"text": str(text_file), "vocabulary_size": 300, **options}
    return load_corpus(LanguageModelOptions.model_validate(values), cache_dir)


def described(found: Corpus) -> tuple[dict[str, str], bytes, bytes, bytes]:
    return (
        found.fingerprint(),
        found.train_tokens.tobytes(),
        found.heldout_tokens.tobytes(),
        found.heldout_bytes.tobytes(),
    )


def _load_elsewhere(text_file: Path, cache_dir: Path) -> tuple[dict[str, str], bytes, bytes, bytes]:
    return described(load(text_file, cache_dir))


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_train_and_heldout_tokens_together_are_the_text(text_file: Path, tmp_path: Path, tokenizer: str) -> None:
    found = load(text_file, tmp_path / "cache", tokenizer=tokenizer)
    text = text_file.read_text()
    parts = list(pieces([text], len(text.encode())))
    train = "".join(part for index, part in enumerate(parts) if index % 20 != 19)
    heldout = "".join(part for index, part in enumerate(parts) if index % 20 == 19)
    assert found.tokenizer.decode(found.train_tokens.tolist()) == train
    assert found.tokenizer.decode(found.heldout_tokens.tolist()) == heldout
    assert found.heldout_bytes.sum() == len(heldout.encode())
    assert 0.03 < len(heldout) / len(text) < 0.07
    assert found.text_bytes == len(text.encode())
    assert found.train_tokens.dtype == np.uint16


def test_processes_that_start_together_and_another_machine_get_the_same(text_file: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(_load_elsewhere, [(text_file, tmp_path / "shared")] * 2)
    assert first == second == described(load(text_file, tmp_path / "other machine"))
    folders = [path for path in (tmp_path / "shared" / "language_model").iterdir() if path.is_dir()]
    assert len(folders) == 1


def test_the_second_start_does_not_tokenise_again(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = described(load(text_file, tmp_path))
    monkeypatch.setattr(corpus_module, "train_bpe", None)
    assert described(load(text_file, tmp_path)) == first


def test_a_damaged_cache_is_made_again(text_file: Path, tmp_path: Path) -> None:
    first = described(load(text_file, tmp_path))
    (tokens,) = (tmp_path / "language_model").glob("*/train.tokens")
    tokens.write_bytes(tokens.read_bytes()[:-4])
    assert described(load(text_file, tmp_path)) == first


def test_another_text_or_setting_has_a_fingerprint_or_a_cache_of_its_own(text_file: Path, tmp_path: Path) -> None:
    first = load(text_file, tmp_path)
    assert load(text_file, tmp_path, vocabulary_size=280).fingerprint()["tokenizer"] != first.fingerprint()["tokenizer"]
    assert len(load(text_file, tmp_path, heldout_every=5).heldout_tokens) > 2 * len(first.heldout_tokens)
    text_file.write_text(text_file.read_text().replace("peace", "peach", 1))
    assert load(text_file, tmp_path).fingerprint()["text"] != first.fingerprint()["text"]


def test_how_documents_are_spread_over_files_does_not_matter(tmp_path: Path) -> None:
    together, apart = tmp_path / "one.jsonl", tmp_path / "apart"
    apart.mkdir()
    texts = [prose(seed, 1500) for seed in range(3)]
    together.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for index, text in enumerate(texts):
        (apart / f"{index}.txt").write_text(text)
    assert described(load(together, tmp_path / "cache")) == described(load(apart, tmp_path / "cache"))


def test_pieces_end_with_lines_and_never_cross_documents() -> None:
    texts = [prose(seed, 3000) for seed in range(2)] + ["x" * 1000]
    cut = list(pieces(texts, 40_000))
    assert "".join(cut) == "".join(texts)
    assert max(map(len, cut)) <= corpus_module.PIECE_CHARACTERS_MIN
    borders = {sum(map(len, cut[:index])) for index in range(len(cut) + 1)}
    assert {len(texts[0]), len(texts[0]) + len(texts[1])} <= borders
    assert sum(part.endswith("\n") for part in cut) > 0.9 * (len(cut) - 4)


def test_a_tokenizer_of_the_users_own_is_used_and_exported_as_it_is(text_file: Path, tmp_path: Path) -> None:
    own = train_bpe([prose(9, 500)], 270)
    path = tmp_path / "tokenizer.json"
    path.write_text(own.to_json())
    found = load(text_file, tmp_path, tokenizer=str(path))
    assert found.tokenizer.digest() == own.digest()
    assert found.tokenizer.vocabulary_size == own.vocabulary_size <= 270


def test_a_tokenizer_that_cannot_be_read_is_told(text_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(WorkloadError, match=r"workload\.options\.tokenizer = .* cannot be read .*give 'bpe', 'bytes'"):
        load(text_file, tmp_path, tokenizer=str(path))
    path.write_text('{"model": "none"}')
    with pytest.raises(WorkloadError, match=r"is not a Hugging Face tokenizer\.json"):
        load(text_file, tmp_path, tokenizer=str(path))


def test_empty_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(WorkloadError, match=r"empty\.txt' is empty; it has to hold some text"):
        load(tmp_path / "empty.txt", tmp_path)


def test_half_a_surrogate_pair_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "bad: \\ud800"}\n')
    with pytest.raises(WorkloadError, match=r"document 2 holds half a surrogate pair, '\\ud800', at character 5,"):
        load(tmp_path / "a.jsonl", tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_told(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WorkloadError, match=r"The cache folder .*taken cannot be used \(.*Not a directory"):
        load(text_file, tmp_path / "taken")


@pytest.mark.parametrize("text", ["plain", "Grüße 日本 🙂 naïve", " leading and trailing  ", "\n\n", "🙂"])
@pytest.mark.parametrize("kind", ["bpe", "bytes", "words"])
def test_the_bytes_that_tokens_stand_for_add_up_to_the_text(text: str, kind: str) -> None:
    tokenizer = {"bpe": lambda: train_bpe([prose(3, 300)], 300), "bytes": byte_tokenizer, "words": _words}[kind]()
    tokens, covered = tokenizer.encode_with_bytes(text)
    assert len(tokens) == len(covered)
    if len(tokens):
        assert covered.sum() == len(text.encode())
        assert tokens.tolist() == tokenizer.encode([text])[0].tolist()


def test_bytes_are_their_own_tokens_and_the_end_mark_is_number_zero() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocabulary_size == 257
    assert tokenizer.end_of_text == 0
    assert len(tokenizer.encode(["häh"])[0]) == 4
    assert tokenizer.decode(tokenizer.encode(["häh"])[0].tolist()) == "häh"
    assert tokenizer.decode([0]) == ""


def test_a_large_vocabulary_takes_four_bytes_a_token() -> None:
    assert _words({f"w{number}": number for number in range(70_000)}).dtype is np.uint32


def _words(vocabulary: dict[str, int] | None = None) -> TextTokenizer:
    """A tokenizer that drops blanks and knows few words; it has no end mark."""
    import tokenizers

    known = vocabulary or {"[UNK]": 0, "plain": 1, "and": 2}
    model = tokenizers.models.WordLevel(known, unk_token=next(iter(known)))
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    assert END_OF_TEXT not in known
    return TextTokenizer(made)
