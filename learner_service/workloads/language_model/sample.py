"""Samples text from the model that a run exported.

    python -m learner_service.workloads.language_model.sample --model runs/demo/model.safetensors --prompt "We the"

The file says by itself which sizes the model has; the tokenizer lies beside it as tokenizer.json, or is made again from
the text that the run was trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from decoupled_diloco.arrays.tree import leaf_name
from learner_service.workload import WorkloadError
from learner_service.workloads.language_model.corpus import load_corpus
from learner_service.workloads.language_model.model import Decoder
from learner_service.workloads.language_model.options import LanguageModelOptions
from learner_service.workloads.language_model.tokenizer import TextTokenizer, parse_tokenizer
from learner_service.workloads.language_model.workload import decoder_sizes
from learner_service.workloads.options import parse_options

PACKAGE = "learner_service.workloads.language_model"
TOKENIZER_FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """What an exported file holds.

    Attributes:
        tensors: float32 arrays by name.
        options: of the workload that trained it.
    """

    tensors: Mapping[str, np.ndarray]
    options: LanguageModelOptions


def read_exported(path: Path) -> ExportedModel:
    """Reads an exported model.

    Raises:
        WorkloadError: there is no such file, or it is not an export of a language model.
    """
    if not path.is_file():
        raise WorkloadError(f"--model {path} is not there; a run writes model.safetensors when it finishes.")
    try:
        with safe_open(path, framework="numpy") as stream:
            header = dict(stream.metadata() or {})
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError) as error:
        raise WorkloadError(
            f"--model {path} cannot be read as safetensors ({error}); give the model.safetensors that a run exported."
        ) from error
    factory = header.get("workload_factory", "")
    if not factory.startswith(PACKAGE):
        raise WorkloadError(
            f"--model {path} was exported by "
            f"{f'the workload {factory!r}' if factory else 'something else than a run'}; this command samples from "
            f"models of {PACKAGE}."
        )
    return ExportedModel(
        tensors,
        parse_options(LanguageModelOptions, json.loads(header.get("workload_options", "{}")), "the language model"),
    )


def find_tokenizer(path: Path, options: LanguageModelOptions, cache_dir: Path) -> TextTokenizer:
    """Returns the tokenizer beside an exported model; if there is none, makes it from the run's text.

    Args:
        path: of the model.
        options: of the workload that trained it.
        cache_dir: where the tokenised text is, or will be.

    Raises:
        WorkloadError: neither is possible.
    """
    beside = path.parent / TOKENIZER_FILE
    if beside.is_file():
        return parse_tokenizer(beside.read_bytes(), str(beside))
    try:
        return load_corpus(options, cache_dir).tokenizer
    except WorkloadError as error:
        raise WorkloadError(
            f"--model {path} has no {TOKENIZER_FILE} beside it, and it cannot be made again from the run's text: "
            f"{error} Copy the {TOKENIZER_FILE} of the run into {path.parent}."
        ) from error


def match_params(decoder: Decoder, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Puts tensors by name into the decoder's nested dict.

    Raises:
        WorkloadError: a tensor is absent or has another shape.
    """
    entries, structure = jax.tree_util.tree_flatten_with_path(decoder.shapes)
    leaves = []
    for path, wanted in entries:
        name = leaf_name(path)
        found = tensors[name].shape if name in tensors else None
        if found != wanted.shape:
            raise WorkloadError(
                f"--model does not fit its options and tokenizer: tensor {name!r} should have shape {wanted.shape} but "
                f"{f'has shape {found}' if found else 'is absent'}; keep a model together with the {TOKENIZER_FILE} "
                "of its run."
            )
        leaves.append(jax.numpy.asarray(tensors[name]))
    params: dict[str, Any] = jax.tree_util.tree_unflatten(structure, leaves)
    return params


def continue_tokens(
    next_logits: Callable[[np.ndarray], np.ndarray],
    prompt: Sequence[int],
    token_count: int,
    temperature: float,
    generator: np.random.Generator,
) -> list[int]:
    """Returns `token_count` tokens after the prompt.

    Args:
        next_logits: from all tokens so far to the logits [vocabulary] of the next one.
        prompt: at least one token.
        token_count: how many, >= 0.
        temperature: 0 takes the likeliest token each time, 1 samples from the model's distribution.
        generator: source of randomness.
    """
    tokens = list(prompt)
    for _ in range(token_count):
        logits = next_logits(np.array(tokens, np.int32)).astype(np.float64)
        if temperature:
            logits = logits / temperature + generator.gumbel(size=logits.shape)
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


def sample(model: ExportedModel, tokenizer: TextTokenizer, arguments: argparse.Namespace) -> str:
    """Returns the prompt and what the model makes of it."""
    length = model.options.sequence_length
    decoder = Decoder(decoder_sizes(model.options, tokenizer.vocabulary_size))
    params = match_params(decoder, model.tensors)
    forward = jax.jit(decoder.logits)

    def next_logits(tokens: np.ndarray) -> np.ndarray:
        recent = tokens[-length:]
        window = np.zeros((1, length), np.int32)
        window[0, : len(recent)] = recent
        logits = np.array(forward(params, window)[len(recent) - 1])
        if tokenizer.end_of_text is not None:
            logits[tokenizer.end_of_text] = -np.inf
        return logits

    start = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    prompt = [*start, *tokenizer.encode([arguments.prompt])[0].tolist()] or [0]
    generator = np.random.default_rng(arguments.seed)
    made = continue_tokens(next_logits, prompt, arguments.tokens, arguments.temperature, generator)
    return tokenizer.decode([*prompt[len(start) :], *made])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(f"python -m {PACKAGE}.sample", description="Sample text from an exported model.")
    parser.add_argument("--model", type=Path, required=True, help="the model.safetensors that a run exported")
    parser.add_argument("--prompt", default="", help="how the text begins")
    parser.add_argument("--tokens", type=_count, default=60, help="how many tokens to add (default 60)")
    parser.add_argument("--temperature", type=_temperature, default=0.8, help="0: no chance at all (default 0.8)")
    parser.add_argument("--seed", type=_count, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path("~/.cache/decoupled-diloco"),
        help="where tokenised text is kept, if there is no tokenizer.json beside the model",
    )
    parsed = parser.parse_args(arguments)
    try:
        model = read_exported(parsed.model)
        tokenizer = find_tokenizer(parsed.model, model.options, parsed.cache_dir.expanduser())
        print(sample(model, tokenizer, parsed))
    except WorkloadError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _count(text: str) -> int:
    """An integer >= 0 of the command line."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _temperature(text: str) -> float:
    """A number >= 0 of the command line."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
