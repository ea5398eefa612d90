"""A small Gemma-like language model on text: "learner_service.workloads.language_model:factory"."""

from learner_service.workloads.language_model.workload import LanguageModel, factory

__all__ = ["LanguageModel", "factory"]
