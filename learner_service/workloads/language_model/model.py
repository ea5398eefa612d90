"""A decoder in the manner of Gemma, in flax nnx, as pure functions over a plain dict of arrays.

RMSNorm with (1 + scale), rotary positions, grouped-query attention, tanh-GeGLU, a tied embedding whose rows
are scaled by sqrt(width) on the way in, optionally softly capped logits. Everything is float32.

Parameters are a nested dict of arrays with readable key paths ("layer_00/attention/query"), split from the
nnx module once; `Decoder.token_losses` merges them back while it is traced, which costs nothing in the
compiled step. Tokens are flattened to [batch * time, width] around every matrix product: XLA's CPU backend
computes a weight's gradient two to three times slower when two axes are contracted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROTARY_WAVELENGTH_MAX = 10_000.0
NORM_EPSILON = 1e-6

EMBEDDING_DEVIATION = 0.5
"""Initial deviation of a logit; small, so that the untrained model's loss is close to log(vocabulary)."""

Draw = Callable[[tuple[int, ...], float], jax.Array]
"""From a shape and a standard deviation to an array of independent normal numbers."""


@dataclasses.dataclass(frozen=True)
class DecoderSizes:
    """Sizes of the decoder, as in `LanguageModelOptions`; the vocabulary is the tokenizer's."""

    vocabulary_size: int
    d_model: int
    layer_count: int
    ff: int
    head_count: int
    kv_head_count: int
    head_dim: int
    logit_softcap: float | None = None


class RmsNorm(nnx.Module):
    """Scales vectors to unit root mean square, then by (1 + scale)."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.asarray(np.zeros(width, np.float32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., width]."""
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + NORM_EPSILON) * (1.0 + self.scale[...])


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, sizes: DecoderSizes, draw: Draw) -> None:
        width, head_dim = sizes.d_model, sizes.head_dim
        self.query = _matrix(draw, width, sizes.head_count * head_dim)
        self.key = _matrix(draw, width, sizes.kv_head_count * head_dim)
        self.value = _matrix(draw, width, sizes.kv_head_count * head_dim)
        self.out = _matrix(draw, sizes.head_count * head_dim, width)
        self.sizes = sizes

    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        """[batch * time, width] -> [batch * time, width]."""
        kv_heads, head_dim = self.sizes.kv_head_count, self.sizes.head_dim
        time = x.shape[0] // batch
        query = _rotated((x @ self.query[...]).reshape(batch, time, self.sizes.head_count, head_dim))
        key = _rotated((x @ self.key[...]).reshape(batch, time, kv_heads, head_dim))
        value = (x @ self.value[...]).reshape(batch, time, kv_heads, head_dim)
        query = query.reshape(batch, time, kv_heads, -1, head_dim)
        scores = jnp.einsum("btkgd,bskd->bkgts", query, key) / np.sqrt(head_dim).astype(np.float32)
        causal = np.tril(np.ones((time, time), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, value)
        return mixed.reshape(batch * time, -1) @ self.out[...]


class FeedForward(nnx.Module):
    """Gated feed-forward layer: down(gelu(gate(x)) * up(x)) with the tanh form of GELU."""

    def __init__(self, sizes: DecoderSizes, draw: Draw) -> None:
        self.gate = _matrix(draw, sizes.d_model, sizes.ff)
        self.up = _matrix(draw, sizes.d_model, sizes.ff)
        self.down = _matrix(draw, sizes.ff, sizes.d_model)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch * time, width] -> [batch * time, width]."""
        return (jax.nn.gelu(x @ self.gate[...], approximate=True) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, sizes: DecoderSizes, draw: Draw) -> None:
        self.attention_norm = RmsNorm(sizes.d_model)
        self.attention = Attention(sizes, draw)
        self.feed_forward_norm = RmsNorm(sizes.d_model)
        self.feed_forward = FeedForward(sizes, draw)

    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        """[batch * time, width] -> [batch * time, width]."""
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.feed_forward(self.feed_forward_norm(x))


class DecoderModule(nnx.Module):
    """The whole decoder as an nnx module; blocks are attributes `layer_00`, `layer_01`, ..."""

    def __init__(self, sizes: DecoderSizes, draw: Draw) -> None:
        shape = (sizes.vocabulary_size, sizes.d_model)
        self.embedding = nnx.Param(draw(shape, EMBEDDING_DEVIATION * sizes.d_model**-0.5))
        for layer in range(sizes.layer_count):
            setattr(self, _layer_name(layer), Block(sizes, draw))
        self.final_norm = RmsNorm(sizes.d_model)
        self.sizes = sizes

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Int [batch, time] -> float32 logits [batch * time, vocabulary]."""
        batch = tokens.shape[0]
        embedding = self.embedding[...]
        x = embedding[tokens.reshape(-1)] * np.sqrt(self.sizes.d_model).astype(np.float32)
        for layer in range(self.sizes.layer_count):
            x = getattr(self, _layer_name(layer))(x, batch)
        logits = self.final_norm(x) @ embedding.T
        if self.sizes.logit_softcap is None:
            return logits
        return self.sizes.logit_softcap * jnp.tanh(logits / self.sizes.logit_softcap)


class Decoder:
    """The decoder as pure functions of a nested dict of float32 arrays.

    Args:
        sizes: sizes of the model.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        self._sizes = sizes
        abstract = nnx.eval_shape(lambda: DecoderModule(sizes, _zeros))
        self._graph, state = nnx.split(abstract)
        self.shapes: dict[str, Any] = nnx.to_pure_dict(state)
        """The parameters' nested dict with a `jax.ShapeDtypeStruct` in place of each array."""

    def init(self, seed: int) -> dict[str, Any]:
        """Returns initial parameters, a function of the seed (>= 0) alone.

        NumPy draws them: nothing to compile, which would take longer than the first hundred steps.
        """
        generator = np.random.default_rng(seed)

        def draw(shape: tuple[int, ...], deviation: float) -> jax.Array:
            return jnp.asarray(generator.standard_normal(shape, np.float32) * np.float32(deviation))

        params: dict[str, Any] = nnx.to_pure_dict(nnx.state(DecoderModule(self._sizes, draw), nnx.Param))
        return params

    def logits(self, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        """Int [batch, time] -> float32 logits [batch * time, vocabulary]. Pure; to be traced."""
        module = nnx.merge(self._graph, nnx.State(params))
        result: jax.Array = module(tokens)
        return result

    def token_losses(self, params: dict[str, Any], windows: jax.Array) -> jax.Array:
        """Returns -log p of each token given those before it in its window, in nats.

        Args:
            params: as `init` returns them.
            windows: int [batch, time + 1].

        Returns:
            Float32 [batch, time]; entry t is for token t + 1. Pure; to be traced.
        """
        targets = windows[:, 1:]
        logits = self.logits(params, windows[:, :-1])
        chosen = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=-1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).reshape(targets.shape)


def _layer_name(layer: int) -> str:
    return f"layer_{layer:02d}"


def _matrix(draw: Draw, fan_in: int, fan_out: int) -> nnx.Param[jax.Array]:
    """A matrix with entries of variance 1 / fan_in."""
    return nnx.Param(draw((fan_in, fan_out), fan_in**-0.5))


def _zeros(shape: tuple[int, ...], deviation: float) -> jax.Array:
    """A `Draw` for when only shapes are wanted."""
    del deviation
    return jnp.zeros(shape)


def _rotated(x: jax.Array) -> jax.Array:
    """Turns each pair (i, i + half) by its position's angle; [batch, time, heads, head_dim] -> the same."""
    time, half = x.shape[1], x.shape[-1] // 2
    frequency = ROTARY_WAVELENGTH_MAX ** (-np.arange(half) / half)
    angle = (np.arange(time)[:, None] * frequency)[:, None, :]
    sine, cosine = np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
