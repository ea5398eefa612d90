"""The language model as a workload: what it computes, that it learns, and what its options say when they are wrong."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from decoupled_diloco.arrays.tree import ParameterTree
from learner_service.workload import MergeRule, WorkloadContext, WorkloadError, load_workload
from learner_service.workloads.language_model import sample
from learner_service.workloads.language_model.model import Decoder, DecoderSizes
from learner_service.workloads.language_model.workload import LanguageModel

FACTORY = "learner_service.workloads.language_model:factory"
TINY: dict[str, object] = {
    "tokenizer": "bytes",
    "d_model": 16,
    "layer_count": 1,
    "ff": 24,
    "head_count": 4,
    "kv_head_count": 2,
    "head_dim": 4,
    "sequence_length": 16,
    "batch_size": 8,
    "eval_windows": 48,
}


def context(folder: Path, **options: object) -> WorkloadContext:
    return WorkloadContext(seed=5, slot_count=2, total_steps=100, cache_dir=folder, options=options)


def problem(folder: Path, **options: object) -> str:
    with pytest.raises(WorkloadError) as raised:
        load_workload(FACTORY, context(folder, **options))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language_model")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\nAnd again, it does so.\n" * 400)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    workload = load_workload(FACTORY, context(folder, text=str(folder / "text.txt"), **TINY))
    assert isinstance(workload, LanguageModel)
    return workload


@pytest.fixture(scope="module")
def trained(model: LanguageModel) -> dict[str, Any]:
    """Parameters after 100 steps, as a learner takes them."""
    optimizer = model.optimizer()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Any, rate: float) -> tuple[Any, Any]:
        delta = jax.grad(model.loss)(params, batch)
        updates, state = optimizer.update(delta, state, params)
        return jax.tree.map(lambda param, update: param + rate * update, params, updates), state

    params = model.init(0)
    state = optimizer.init(params)
    batches = model.data(0, 0)
    for number in range(100):
        params, state = step(params, state, next(batches), model.learning_rate(number))
    return params


def test_names_are_readable_and_only_the_embedding_is_averaged(model: LanguageModel) -> None:
    schema = ParameterTree(model.init(0), model.merge_rule).schema
    names = [spec.name for spec in schema.tensors]
    assert "embedding" in names
    assert "layer_00/attention/query" in names
    assert "layer_00/feed_forward_norm/scale" in names
    assert [spec.name for spec in schema.tensors if spec.rule == "avg"] == ["embedding"]
    assert {spec.dtype for spec in schema.tensors} == {"float32"}
    assert model.merge_rule("layer_00/attention/query", (16, 16)) == MergeRule("rda")


def test_initial_parameters_follow_from_the_seed_alone(model: LanguageModel) -> None:
    first, again, other = model.init(1), model.init(1), model.init(2)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), first, again))
    assert not jnp.array_equal(first["embedding"], other["embedding"])


def test_the_untrained_model_knows_nothing(model: LanguageModel) -> None:
    figures = model.evaluate(model.init(0))
    assert figures["loss"] == pytest.approx(math.log(257), rel=0.05)
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2), rel=0.02)


def test_training_learns(model: LanguageModel, trained: dict[str, Any]) -> None:
    figures = model.evaluate(trained)
    assert figures["bits_per_byte"] < 3.0
    assert figures == model.evaluate(trained)


def test_evaluation_is_the_mean_over_its_windows(model: LanguageModel, trained: dict[str, Any]) -> None:
    heldout = model.corpus.heldout_tokens
    count = (len(heldout) - 1) // 16
    starts = [index * count // 48 * 16 for index in range(48)]
    windows = np.stack([heldout[start : start + 17] for start in starts]).astype(np.int32)
    loss = float(jax.jit(model.loss)(trained, windows))
    figures = model.evaluate(trained)
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
    text_bytes = sum(int(model.corpus.heldout_bytes[start + 1 : start + 17].sum()) for start in starts)
    assert figures["bits_per_byte"] == pytest.approx(loss / math.log(2) * 48 * 16 / text_bytes, rel=1e-5)


def test_no_token_sees_those_after_it(model: LanguageModel, trained: dict[str, Any]) -> None:
    batch = next(model.data(0, 0))
    changed = batch.copy()
    changed[:, 9:] = (changed[:, 9:] + 1) % 257
    losses = jax.jit(model.decoder.token_losses)
    before, after = losses(trained, batch), losses(trained, changed)
    np.testing.assert_allclose(before[:, :8], after[:, :8], rtol=1e-5)
    assert not np.allclose(before[:, 8:], after[:, 8:])


def test_a_decoder_agrees_with_the_formulas_written_out() -> None:
    sizes = DecoderSizes(7, 8, 1, 12, head_count=4, kv_head_count=2, head_dim=4, logit_softcap=2.0)
    decoder = Decoder(sizes)
    params = jax.tree.map(lambda leaf: leaf + 0.1, decoder.init(0))
    tokens = np.array([[3, 1, 6, 2, 0]])
    np.testing.assert_allclose(
        jax.jit(decoder.logits)(params, tokens), _logits_written_out(params, tokens[0]), rtol=2e-4, atol=2e-5
    )


def _logits_written_out(params: Any, tokens: np.ndarray) -> np.ndarray:
    """One sequence through one block in float64, head by head and pair by pair."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    block = params["layer_00"]

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def turned(vector: np.ndarray, place: int) -> np.ndarray:
        pairs = vector[:2] + 1j * vector[2:]
        pairs = pairs * np.exp(1j * place * np.array([1.0, 10_000.0**-0.5]))
        return np.concatenate([pairs.real, pairs.imag])

    x = params["embedding"][tokens] * math.sqrt(8)
    y = normed(x, block["attention_norm"]["scale"])
    query, key, value = (y @ block["attention"][name] for name in ("query", "key", "value"))
    heads = np.zeros((5, 16))
    for head in range(4):
        mine, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        for t in range(5):
            scores = [turned(query[t, mine], t) @ turned(key[s, shared], s) / 2.0 for s in range(t + 1)]
            weights = np.exp(scores) / np.exp(scores).sum()
            heads[t, mine] = weights @ value[: t + 1, shared]
    x = x + heads @ block["attention"]["out"]
    y = normed(x, block["feed_forward_norm"]["scale"])
    gate, up = y @ block["feed_forward"]["gate"], y @ block["feed_forward"]["up"]
    gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    x = x + (gelu * up) @ block["feed_forward"]["down"]
    return 2.0 * np.tanh(normed(x, params["final_norm"]["scale"]) @ params["embedding"].T / 2.0)


def test_batches_are_windows_of_the_text_and_count_their_targets(model: LanguageModel) -> None:
    batch = next(model.data(1, 12))
    assert batch.shape == (8, 17)
    assert batch.dtype == np.int32
    assert model.batch_tokens(batch) == 8 * 16
    np.testing.assert_array_equal(batch, next(model.data(1, 12)))


def test_the_rate_rises_falls_and_stays_at_the_end(model: LanguageModel) -> None:
    rates = [model.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.016 / 4)
    assert rates[4] == max(rates) == pytest.approx(0.016)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert model.learning_rate(100) == model.learning_rate(105) == pytest.approx(0.05 * 0.016)


def test_weight_decay_acts_on_matrices_alone(folder: Path) -> None:
    strong = load_workload(FACTORY, context(folder, text=str(folder / "text.txt"), **{**TINY, "weight_decay": 0.5}))
    params = {"embedding": jnp.ones((2, 2)), "final_norm": {"scale": jnp.ones(2)}, "query": jnp.ones((2, 2))}
    optimizer = strong.optimizer()
    none = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(none, optimizer.init(params), params)
    assert np.all(updates["embedding"] == 0)
    assert np.all(updates["final_norm"]["scale"] == 0)
    np.testing.assert_allclose(updates["query"], -0.5)


def test_tokens_are_drawn_from_the_models_distribution_and_the_seed_decides() -> None:
    def next_logits(tokens: np.ndarray) -> np.ndarray:
        return np.log([0.6, 0.3, 0.1]) if tokens[-1] else np.array([-np.inf, 0.0, -np.inf])

    def drawn(temperature: float, seed: int) -> list[int]:
        return sample.continue_tokens(next_logits, [1], 3000, temperature, np.random.default_rng(seed))

    tokens = drawn(1.0, 4)
    after_others = [after for before, after in pairwise([1, *tokens]) if before]
    shares = np.bincount(after_others, minlength=3) / len(after_others)
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.05)
    assert {after for before, after in pairwise([1, *tokens]) if not before} == {1}
    assert tokens == drawn(1.0, 4) != drawn(1.0, 5)
    assert drawn(0.0, 4) == drawn(0.0, 5) == [0, 1] * 1500


def test_a_sample_continues_the_prompt(
    model: LanguageModel, trained: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = export(model, trained, tmp_path)
    assert [written.name for written in model.export_assets(tmp_path)] == ["tokenizer.json"]
    arguments = ["--model", str(path), "--prompt", "The quick", "--tokens", "30", "--seed", "4"]
    assert sample.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("The quick")
    assert 30 <= len(text) - len("The quick") <= 31


def test_a_sample_needs_no_tokenizer_file_where_the_text_is(
    model: LanguageModel, trained: dict[str, Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = export(model, trained, tmp_path)
    arguments = ["--model", str(path), "--tokens", "5", "--temperature", "0", "--cache-dir"]
    assert sample.main([*arguments, str(folder)]) == 0
    assert len(capsys.readouterr().out) == 6


def export(model: LanguageModel, params: Any, folder: Path, **header: str) -> Path:
    """Writes a model as a run does when it finishes."""
    leaves = ParameterTree(params, model.merge_rule).leaves(params)
    written = {"workload_factory": FACTORY, "workload_options": model.options.model_dump_json(), **header}
    save_file({name: np.asarray(leaf) for name, leaf in leaves.items()}, folder / "model.safetensors", written)
    return folder / "model.safetensors"


def test_a_sample_that_cannot_be_taken_says_why(
    model: LanguageModel, trained: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(path: Path) -> str:
        assert sample.main(["--model", str(path)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert "is not there" in answer(tmp_path / "model.safetensors")
    (tmp_path / "text.safetensors").write_text("no model")
    assert "cannot be read as safetensors" in answer(tmp_path / "text.safetensors")
    assert "exported by the workload 'mine:factory'" in answer(
        export(model, trained, tmp_path, workload_factory="mine:factory")
    )
    gone = model.options.model_copy(update={"text": str(tmp_path / "gone.txt")}).model_dump_json()
    assert "has no tokenizer.json beside it" in answer(export(model, trained, tmp_path, workload_options=gone))
    path = export(model, {**trained, "embedding": trained["embedding"][:200]}, tmp_path)
    model.export_assets(tmp_path)
    assert "tensor 'embedding' should have shape (257, 16) but has shape (200, 16)" in answer(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"headcount": 2},
            "workload.options.headcount is not an option of the language model; did you mean 'head_count'?",
        ),
        ({"batch_size": "8"}, "workload.options.batch_size = '8': input should be a valid integer."),
        ({"d_model": 0}, "workload.options.d_model = 0: input should be greater than or equal to 2."),
        ({"head_count": 3, "kv_head_count": 2}, "head_count = 3 is not a multiple of kv_head_count = 2"),
        ({"head_dim": 5}, "workload.options.head_dim = 5: input should be a multiple of 2."),
        ({"fsdp_device_count": 3}, "batch_size = 8 is not a multiple of fsdp_device_count = 3"),
    ],
)
def test_wrong_options_are_told(tmp_path: Path, options: dict[str, object], expected: str) -> None:
    assert expected in problem(tmp_path, **options)


def test_too_little_text_is_told_with_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("word " * 300)
    options = {**TINY, "text": str(tmp_path / "short.txt")}
    message = problem(tmp_path, **{**options, "batch_size": 64})
    assert "holds 1500 bytes, which give 94 training windows" in message
    assert "so 128 windows. Give more text, or lower sequence_length, batch_size or data.slot_count." in message
    assert "heldout_every = 20 holds out less than one window" in problem(tmp_path, **options)


def test_more_devices_than_there_are_is_told(folder: Path) -> None:
    options = {**TINY, "text": str(folder / "text.txt"), "batch_size": 4096, "fsdp_device_count": 4096}
    (folder / "more.txt").write_text("word " * 60_000)
    workload = load_workload(
        FACTORY, context(folder, **{**options, "text": str(folder / "more.txt"), "sequence_length": 2})
    )
    with pytest.raises(WorkloadError, match=r"fsdp_device_count = 4096, but this process has \d+ device"):
        workload.mesh()


def test_one_device_needs_no_mesh(model: LanguageModel) -> None:
    assert model.mesh() is None
