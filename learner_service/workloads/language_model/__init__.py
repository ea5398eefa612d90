"""A small Gemma-like language model on text: "learner_service.workloads.language_model:factory".

`options` says what can be set. Text goes through `text_sources` (files and objects to documents), `corpus` (documents
to token numbers on disk, with `tokenizer`) and `batches` (token numbers to what a slot trains on); `model` is the
decoder, `workload` puts them together, `sample` is the command that continues a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner_service.workload import WorkloadContext

if TYPE_CHECKING:
    from learner_service.workloads.language_model.workload import LanguageModel


def factory(context: WorkloadContext) -> LanguageModel:
    """Makes the workload.

    The first call on a machine tokenises the text (seconds per 10 MB); later ones find it in `context.cache_dir`.

    Raises:
        WorkloadError: wrong options, or no usable text.
    """
    from learner_service.workloads.language_model.workload import make  # imports jax, which text tools need not

    return make(context)
