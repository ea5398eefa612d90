"""Decoupled DiLoCo: fault-tolerant distributed pre-training.

For people who own a training loop, one function is enough::

    import decoupled_diloco

    with decoupled_diloco.learner("run.toml", params, learner_id="eu-1", syncer="syncer:50051") as d:
        params = d.start(params)
        while not d.finished:
            params, state, loss = step(params, state, next(batches))
            params = d.step_boundary(params, tokens=batch_tokens, loss=loss)

Everything else is the business of the services: `syncer_service`, `learner_service`, `syncerctl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from learner_service.session import Session

__version__: str

__all__ = ["__version__", "learner"]


def __getattr__(name: str) -> Any:
    """The release, looked up when somebody asks: every import of a part of this package passes through here."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from decoupled_diloco.command_line import software_version

    return software_version()


def learner(
    config: str | Path | RunConfig | Mapping[str, object],
    params: Any,
    *,
    merge_rule: Callable[[str, tuple[int, ...]], Any] | None = None,
    fingerprint: Mapping[str, str] | None = None,
    **settings: object,
) -> Session:
    """Takes part in a run with a training loop of your own.

    Use the result as a context manager; its methods are those of `learner_service.session.Session`. Needs the extra
    `learner` (JAX).

    Args:
        config: the run file, or its path, or its values as nested tables. All processes of the run have the same.
        params: initial parameters, any pytree: dicts, flax.linen variables, flax.nnx states, equinox modules. Arrays
            of a floating-point type are exchanged, everything else stays as it is. They become the run's first
            parameters only if this learner is the one that is asked for them.
        merge_rule: returns an object with `rule` ("rda" or "avg") and `stack_axis` for a tensor's name and shape;
            default: "avg" for names with "embed", else "rda".
        fingerprint: named digests of what all learners must have in common beyond the run file, such as a tokenizer's.
        **settings: settings of this process, as in the section [learner]: `learner_id`, `syncer`, ...

    Raises:
        decoupled_diloco.runtime.config.ConfigError: a setting cannot be used, or the parameters cannot be exchanged.
    """
    from learner_service import app

    return app.library_session(config, params, merge_rule=merge_rule, fingerprint=fingerprint, **settings)
