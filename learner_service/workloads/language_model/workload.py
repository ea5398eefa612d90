"""The language model as a workload: model, optimizer, data and evaluation together."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from learner_service.workload import MeshLayout, WorkloadContext, WorkloadDefaults, WorkloadError
from learner_service.workloads.language_model.batches import SlotBatches, TokenWindows
from learner_service.workloads.language_model.corpus import Corpus, load_corpus
from learner_service.workloads.language_model.model import Decoder, DecoderSizes
from learner_service.workloads.language_model.options import LanguageModelOptions
from learner_service.workloads.options import parse_options
from learner_service.workloads.sharding import fsdp_layout

EVAL_BATCH_TOKENS = 4096
"""Held-out windows are evaluated in batches of about so many tokens, which bounds the memory for logits."""


def make(context: WorkloadContext) -> LanguageModel:
    """Makes the workload, see `learner_service.workloads.language_model.factory`."""
    options = parse_options(LanguageModelOptions, context.options, "the language model")
    return LanguageModel(context, options, load_corpus(options, context.cache_dir))


class LanguageModel(WorkloadDefaults):
    """A small Gemma-like decoder on text, see `learner_service.workload.Workload`.

    Args:
        context: of the run.
        options: its options, checked.
        corpus: its text, tokenised.
    """

    def __init__(self, context: WorkloadContext, options: LanguageModelOptions, corpus: Corpus) -> None:
        self.options = options
        self.corpus = corpus
        self.decoder = Decoder(decoder_sizes(options, corpus.tokenizer.vocabulary_size))
        self._total_steps = context.total_steps
        windows = TokenWindows(corpus.train_tokens, options.sequence_length)
        self._batches = SlotBatches(windows, options.batch_size, context.slot_count, context.seed)
        self._heldout = TokenWindows(corpus.heldout_tokens, options.sequence_length)
        self._check_text_suffices(context.slot_count, len(windows))
        self._eval_losses = jax.jit(self._weighted_loss)

    def init(self, seed: int) -> dict[str, Any]:
        """Returns the initial parameters: a nested dict of float32 arrays."""
        return self.decoder.init(seed)

    def loss(self, params: dict[str, Any], batch: jax.Array) -> jax.Array:
        """Returns the mean loss in nats per token of int32 windows [batch, sequence_length + 1]."""
        return jnp.mean(self.decoder.token_losses(params, batch))

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW at learning rate 1 behind a clip of the global norm."""
        options = self.options
        return optax.chain(
            optax.clip_by_global_norm(options.clip_norm),
            optax.adamw(1.0, b1=options.b1, b2=options.b2, weight_decay=options.weight_decay, mask=_decayed_tensors),
        )

    def learning_rate(self, schedule_step: int) -> float:
        """Returns a linear warm-up to the peak, then a cosine to `final_share` of it at the run's last step."""
        options = self.options
        warmup_steps = max(1, round(options.warmup_share * self._total_steps))
        if schedule_step < warmup_steps:
            return options.learning_rate * (schedule_step + 1) / warmup_steps
        progress = min(1.0, (schedule_step - warmup_steps) / max(1, self._total_steps - warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return options.learning_rate * (options.final_share + (1.0 - options.final_share) * cosine)

    def data(self, slot: int, cursor: int) -> Iterator[np.ndarray]:
        """Yields int32 windows [batch_size, sequence_length + 1], see `SlotBatches`."""
        return self._batches.iterate(slot, cursor)

    def batch_tokens(self, batch: np.ndarray) -> int:
        """Returns the number of targets in a batch."""
        return int(batch.shape[0]) * (int(batch.shape[1]) - 1)

    def evaluate(self, params: dict[str, Any]) -> dict[str, float]:
        """Returns "loss" (nats per token) and "bits_per_byte" on the held-out windows.

        Bits per byte divides by the bytes of text that the evaluated targets stand for, so it compares across
        tokenizers. The windows are always the same: at most `eval_windows`, spread evenly over the held-out
        text.
        """
        length = self.options.sequence_length
        chosen = _spread(len(self._heldout), self.options.eval_windows)
        batch_windows = max(1, min(len(chosen), EVAL_BATCH_TOKENS // length))
        nats = 0.0
        for start in range(0, len(chosen), batch_windows):
            part = chosen[start : start + batch_windows]
            windows = np.zeros((batch_windows, length + 1), np.int32)
            windows[: len(part)] = self._heldout.take(part)
            counted = np.arange(batch_windows) < len(part)
            nats += float(self._eval_losses(params, windows, counted))
        targets = self._heldout.positions(chosen)[:, 1:]
        text_bytes = int(self.corpus.heldout_bytes[targets].sum(dtype=np.int64))
        return {"loss": nats / targets.size, "bits_per_byte": nats / math.log(2) / max(1, text_bytes)}

    def mesh(self) -> MeshLayout | None:
        """Returns a mesh of `fsdp_device_count` devices, or None where it is 0."""
        return fsdp_layout(self.options.fsdp_device_count)

    def fingerprint(self) -> dict[str, str]:
        """Returns the digests of text and tokenizer."""
        return self.corpus.fingerprint()

    def export_assets(self, folder: Path) -> list[Path]:
        """Writes tokenizer.json beside the exported model; the sample command reads it there."""
        path = folder / "tokenizer.json"
        unfinished = folder / f".tokenizer.json.{os.getpid()}"
        unfinished.write_text(self.corpus.tokenizer.to_json(), encoding="utf-8")
        unfinished.replace(path)
        return [path]

    def _weighted_loss(self, params: dict[str, Any], windows: jax.Array, counted: jax.Array) -> jax.Array:
        """Sum of the losses of the windows that count."""
        return jnp.sum(self.decoder.token_losses(params, windows), where=counted[:, None])

    def _check_text_suffices(self, slot_count: int, window_count: int) -> None:
        """One batch per slot, and one held-out window, is the least."""
        options, size = self.options, self.corpus.text_bytes
        if not self._batches.batches_per_epoch:
            raise WorkloadError(
                f"workload.options.text = {options.text!r} holds {size} bytes, which give {window_count} "
                f"training windows of sequence_length = {options.sequence_length} tokens; {slot_count} data "
                f"slots need at least one batch of batch_size = {options.batch_size} each, so "
                f"{slot_count * options.batch_size} windows. Give more text, or lower sequence_length, "
                "batch_size or data.slot_count."
            )
        if not len(self._heldout):
            raise WorkloadError(
                f"workload.options.text = {options.text!r} holds {size} bytes, of which heldout_every = "
                f"{options.heldout_every} holds out less than one window of sequence_length = "
                f"{options.sequence_length} tokens for evaluation. Give more text, or lower sequence_length "
                "or heldout_every."
            )


def decoder_sizes(options: LanguageModelOptions, vocabulary_size: int) -> DecoderSizes:
    """Returns the sizes of the model that the options ask for, with the tokenizer's vocabulary."""
    return DecoderSizes(
        vocabulary_size=vocabulary_size,
        d_model=options.d_model,
        layer_count=options.layer_count,
        ff=options.ff,
        head_count=options.head_count,
        kv_head_count=options.kv_head_count,
        head_dim=options.head_dim,
        logit_softcap=options.logit_softcap,
    )


def _decayed_tensors(params: Any) -> Any:
    """Which tensors weight decay acts on: matrices, but not the embedding."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim > 1 and "embed" not in jax.tree_util.keystr(path).lower(), params
    )


def _spread(available: int, wanted: int) -> np.ndarray:
    """Indices of `wanted` windows (or of all, if fewer are available), evenly spread; int64."""
    number = min(available, wanted)
    return np.arange(number) * available // number
