"""The maps that come with the package, against the names and shapes of the published files.

Source of names and shapes: the model cards and `model.safetensors.index.json` of Gemma 1, 2 and 3 and of Llama 3 on
Hugging Face, and the modules of `transformers` that write them. The configurations are tiny.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from decoupled_diloco.arrays.fragments import assemble, fragment_schema
from decoupled_diloco.arrays.tree import ParameterTree
from decoupled_diloco.name_maps import load_name_map
from learner_service.workload import default_merge_rule
from learner_service.workloads.language_model.model import Decoder, DecoderSizes
from learner_service.workloads.language_model.sample import match_params
from syncer_service.warm_start import open_safetensors
from tests.numerics.array_source import converted, shapes_of

SIZES = DecoderSizes(vocabulary_size=11, d_model=8, layer_count=12, ff=20, head_count=4, kv_head_count=2, head_dim=6)
WIDTH, QUERY, KEY, FF = SIZES.d_model, SIZES.head_count * SIZES.head_dim, SIZES.kv_head_count * SIZES.head_dim, SIZES.ff

PROJECTIONS = {
    "self_attn.q_proj": (QUERY, WIDTH),
    "self_attn.k_proj": (KEY, WIDTH),
    "self_attn.v_proj": (KEY, WIDTH),
    "self_attn.o_proj": (WIDTH, QUERY),
    "mlp.gate_proj": (FF, WIDTH),
    "mlp.up_proj": (FF, WIDTH),
    "mlp.down_proj": (WIDTH, FF),
}
BOTH_NORMS = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
FOUR_NORMS = BOTH_NORMS | {"pre_feedforward_layernorm": (WIDTH,), "post_feedforward_layernorm": (WIDTH,)}
QUERY_NORMS = {"self_attn.q_norm": (SIZES.head_dim,), "self_attn.k_norm": (SIZES.head_dim,)}

# Of the run: per layer, then once. All flat, by the names of the built-in language model.
RUN_PROJECTIONS = {
    "attention/query": (WIDTH, QUERY),
    "attention/key": (WIDTH, KEY),
    "attention/value": (WIDTH, KEY),
    "attention/out": (QUERY, WIDTH),
    "feed_forward/gate": (WIDTH, FF),
    "feed_forward/up": (WIDTH, FF),
    "feed_forward/down": (FF, WIDTH),
}
RUN_NORMS = {"attention_norm/scale": (WIDTH,), "feed_forward_norm/scale": (WIDTH,)}
RUN_POST_NORMS = {"attention_post_norm/scale": (WIDTH,), "feed_forward_post_norm/scale": (WIDTH,)}
RUN_QUERY_NORMS = {"attention/query_norm/scale": (SIZES.head_dim,), "attention/key_norm/scale": (SIZES.head_dim,)}
ONCE = {"embedding": (11, WIDTH), "final_norm/scale": (WIDTH,)}


def model_file(
    layer: dict[str, tuple[int, ...]], prefix: str = "model.", **once: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Random tensors with the names of a Hugging Face file."""
    generator = np.random.default_rng(7)
    shapes = {f"{prefix}embed_tokens.weight": (11, WIDTH), f"{prefix}norm.weight": (WIDTH,)} | once
    shapes |= {
        f"{prefix}layers.{number}.{name}.weight": shape
        for number in range(SIZES.layer_count)
        for name, shape in layer.items()
    }
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def run_shapes(*layers: dict[str, tuple[int, ...]], **once: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    named = {
        f"layer_{number:02}/{name}": shape
        for number in range(SIZES.layer_count)
        for layer in layers
        for name, shape in layer.items()
    }
    return named | ONCE | once


GEMMA_2 = run_shapes(RUN_PROJECTIONS, RUN_NORMS, RUN_POST_NORMS)
GEMMA_3 = run_shapes(RUN_PROJECTIONS, RUN_NORMS, RUN_POST_NORMS, RUN_QUERY_NORMS)
LLAMA = run_shapes(RUN_PROJECTIONS, RUN_NORMS)
CASES = {
    "gemma 1": ("gemma1", model_file(PROJECTIONS | BOTH_NORMS), LLAMA),
    "gemma 2": ("gemma", model_file(PROJECTIONS | FOUR_NORMS), GEMMA_2),
    "gemma 3": ("gemma", model_file(PROJECTIONS | FOUR_NORMS | QUERY_NORMS), GEMMA_3),
    "gemma 3 with vision": (
        "gemma",
        model_file(PROJECTIONS | FOUR_NORMS | QUERY_NORMS, "language_model.model."),
        GEMMA_3,
    ),
    "gemma 3 with vision, newer names": (
        "gemma",
        model_file(PROJECTIONS | FOUR_NORMS | QUERY_NORMS, "model.language_model."),
        GEMMA_3,
    ),
    "llama 3": (
        "llama",
        model_file(PROJECTIONS | BOTH_NORMS) | {"lm_head.weight": np.arange(11.0 * WIDTH).reshape(11, WIDTH)},
        LLAMA | {"head": (WIDTH, 11)},
    ),
    "llama 3 with a tied embedding": ("llama", model_file(PROJECTIONS | BOTH_NORMS), LLAMA),
}


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_of_the_published_files(case: str) -> None:
    map_name, file, wanted = CASES[case]
    name_map = load_name_map(map_name)
    assert shapes_of(converted(file, name_map)) == wanted
    assert shapes_of(converted(file, name_map, wanted)) == wanted


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_came_in_goes_out_as_it_was(case: str) -> None:
    map_name, file, _ = CASES[case]
    name_map = load_name_map(map_name)
    out = converted(converted(file, name_map), name_map, exports=True)
    if "vision" in case:  # written with the names of text models
        prefix = next(name for name in file if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
        out = {name.replace("model.", prefix, 1): array for name, array in out.items()}
    assert out.keys() == file.keys()
    for name, array in out.items():
        np.testing.assert_array_equal(array, file[name])


def test_the_vision_part_and_a_tied_head_are_left_out() -> None:
    map_name, file, wanted = CASES["gemma 3 with vision"]
    more = {"vision_tower.vision_model.embeddings.patch_embedding.bias", "language_model.lm_head.weight"}
    more |= {"multi_modal_projector.mm_soft_emb_norm.weight"}
    assert shapes_of(converted(file | dict.fromkeys(more, np.zeros(3)), load_name_map(map_name), wanted)) == wanted


def test_a_run_with_a_head_takes_a_tied_embedding_for_it() -> None:
    map_name, file, wanted = CASES["llama 3 with a tied embedding"]
    run = converted(file, load_name_map(map_name), wanted | {"head": (WIDTH, 11)})
    np.testing.assert_array_equal(run["head"], file["model.embed_tokens.weight"].T)


def test_gemma_1_is_the_built_in_language_model_to_the_last_logit(tmp_path: Path) -> None:
    """From a file with Hugging Face's names to a run's parameters; the reference follows GemmaForCausalLM."""
    file = {name: 0.3 * array for name, array in CASES["gemma 1"][1].items()}
    save_file(file, tmp_path / "model.safetensors")
    decoder = Decoder(SIZES)
    schema = ParameterTree(decoder.shapes, default_merge_rule).schema
    source = open_safetensors(str(tmp_path / "model.safetensors"), "gemma1", schema)
    fragmentation = fragment_schema(schema, 5)
    tensors = assemble(fragmentation, {each.index: source.theta(each) for each in fragmentation.fragments})
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32)
    logits = jax.jit(decoder.logits)(match_params(decoder, tensors), tokens)
    np.testing.assert_allclose(logits, hugging_face_gemma(file, tokens[0]), rtol=2e-4, atol=2e-4)


def hugging_face_gemma(file: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits [time, vocabulary] in NumPy float64, step by step as in transformers' modeling_gemma."""
    weights = {name.removeprefix("model.").removesuffix(".weight"): array.astype(float) for name, array in file.items()}
    heads, groups, head_dim, time = SIZES.head_count, SIZES.kv_head_count, SIZES.head_dim, len(tokens)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + weights[name])

    angles = np.outer(np.arange(time), 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim))
    cosine, sine = (np.concatenate([f(angles)] * 2, -1) for f in (np.cos, np.sin))

    def rotated(x: np.ndarray) -> np.ndarray:
        halves = np.concatenate([-x[..., head_dim // 2 :], x[..., : head_dim // 2]], -1)
        return x * cosine + halves * sine

    def by_head(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(time, count, head_dim).transpose(1, 0, 2)

    x = weights["embed_tokens"][tokens] * np.sqrt(WIDTH)
    for number in range(SIZES.layer_count):
        at = f"layers.{number}."
        normed = norm(x, at + "input_layernorm")
        query = rotated(by_head(normed @ weights[at + "self_attn.q_proj"].T, heads))
        key = rotated(by_head(normed @ weights[at + "self_attn.k_proj"].T, groups)).repeat(heads // groups, 0)
        value = by_head(normed @ weights[at + "self_attn.v_proj"].T, groups).repeat(heads // groups, 0)
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(head_dim) + np.triu(np.full((time, time), -1e30), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ value
        x = x + mixed.transpose(1, 0, 2).reshape(time, -1) @ weights[at + "self_attn.o_proj"].T
        normed = norm(x, at + "post_attention_layernorm")
        gate = normed @ weights[at + "mlp.gate_proj"].T
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        x = x + (gelu * (normed @ weights[at + "mlp.up_proj"].T)) @ weights[at + "mlp.down_proj"].T
    return norm(x, "norm") @ weights["embed_tokens"].T
