"""A workload whose mistakes arrive as one `WorkloadError`: what raises, and what returns something of the wrong kind.

All calls go through `calling`, which quotes the exception and keeps its traceback for the log level debug. What fails
inside XLA (no memory left, a device that is lost) is no mistake of the workload and passes as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from decoupled_diloco.runtime.logs import get_logger
from learner_service.workload import Batch, MergeRule, MeshLayout, Params, Workload, WorkloadError, described

log = get_logger(__name__)

ResultT = TypeVar("ResultT")


def name_of(workload: object) -> str:
    """How messages call a workload: by the setting that names it, where that is known."""
    factory = getattr(workload, "factory_name", "")
    return f"workload.factory = {factory!r}" if factory else f"workload {type(workload).__name__}"


@contextmanager
def calling(workload: object, member: str) -> Iterator[None]:
    """Turns whatever the workload raises inside into a `WorkloadError`.

    Args:
        workload: whose member is called.
        member: which, as the message shall name it, for example "data(slot=0, cursor=7)".

    Raises:
        WorkloadError: names the workload and the member, and quotes type, text and place of the exception.
    """
    try:
        yield
    except (WorkloadError, jax.errors.JaxRuntimeError):
        raise
    except (Exception, SystemExit) as error:
        log.debug("workload_failed", member=member, exc_info=error)
        raise WorkloadError(
            f"{name_of(workload)}: {member} raised {described(error)}; correct the workload or workload.options. "
            "The whole traceback is logged at the level debug."
        ) from error


class CheckedWorkload:
    """A complete workload in which every call is checked; itself a `Workload`.

    Args:
        workload: the one that is called.
        factory_name: the run file's `workload.factory`, for messages.
    """

    def __init__(self, workload: Workload, factory_name: str) -> None:
        self._workload = workload
        self.factory_name = factory_name

    def init(self, seed: int) -> Params:
        """See `Workload.init`."""
        with calling(self, f"init(seed={seed})"):
            return self._workload.init(seed)

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """See `Workload.loss`; refuses what is not a floating-point scalar."""
        with calling(self, "loss(params, batch)"):
            loss = self._workload.loss(params, batch)
            array = jnp.asarray(loss)
            shape, dtype = array.shape, array.dtype
        if shape != () or not jnp.issubdtype(dtype, jnp.floating):
            raise self._nonsense(
                "loss(params, batch)",
                f"an array of shape {shape} and type {dtype}",
                "the mean loss of the batch, a float32 scalar",
            )
        return loss

    def optimizer(self) -> optax.GradientTransformation:
        """See `Workload.optimizer`; its two functions are checked as well."""
        with calling(self, "optimizer()"):
            optimizer = self._workload.optimizer()
        if not isinstance(optimizer, optax.GradientTransformation):
            raise self._nonsense("optimizer()", _kind(optimizer), "an optax.GradientTransformation, at learning rate 1")
        return optimizer._replace(
            init=self._guarded(optimizer.init, "the init of optimizer()"),
            update=self._guarded(optimizer.update, "the update of optimizer()"),
        )

    def learning_rate(self, schedule_step: int) -> float:
        """See `Workload.learning_rate`; refuses what is not a finite number."""
        member = f"learning_rate(schedule_step={schedule_step})"
        with calling(self, member):
            rate = float(self._workload.learning_rate(schedule_step))
        if not math.isfinite(rate):
            raise self._nonsense(member, repr(rate), "a finite number")
        return rate

    def data(self, slot: int, cursor: int) -> Iterator[Batch]:
        """See `Workload.data`; refuses batches that end."""
        member = f"data(slot={slot}, cursor={cursor})"
        with calling(self, member):
            batches = iter(self._workload.data(slot, cursor))
        return self._endless(batches, member)

    def batch_tokens(self, batch: Batch) -> int:
        """See `Workload.batch_tokens`; refuses less than 1."""
        with calling(self, "batch_tokens(batch)"):
            tokens = operator.index(self._workload.batch_tokens(batch))
        if tokens < 1:
            raise self._nonsense("batch_tokens(batch)", str(tokens), "a whole number of tokens, at least 1")
        return tokens

    def evaluate(self, params: Params) -> dict[str, float]:
        """See `Workload.evaluate`; refuses figures without "loss" and what is no number."""
        with calling(self, "evaluate(params)"):
            figures = self._workload.evaluate(params)
            found = {str(name): float(value) for name, value in figures.items()}
        if "loss" not in found:
            raise self._nonsense("evaluate(params)", f"figures named {sorted(found)}", 'a dict with at least "loss"')
        return found

    def merge_rule(self, name: str, shape: tuple[int, ...]) -> MergeRule:
        """See `Workload.merge_rule`."""
        with calling(self, f"merge_rule(name={name!r}, shape={shape})"):
            return self._workload.merge_rule(name, shape)

    def mesh(self) -> MeshLayout | None:
        """See `Workload.mesh`."""
        with calling(self, "mesh()"):
            layout = self._workload.mesh()
        if layout is not None and not isinstance(layout, MeshLayout):
            raise self._nonsense("mesh()", _kind(layout), "a learner_service.workload.MeshLayout, or None")
        return layout

    def fingerprint(self) -> dict[str, str]:
        """See `Workload.fingerprint`; refuses what is not text by name."""
        with calling(self, "fingerprint()"):
            found = self._workload.fingerprint()
        if not isinstance(found, Mapping) or not all(isinstance(text, str) for pair in found.items() for text in pair):
            raise self._nonsense("fingerprint()", _kind(found), "a dict of texts by name")
        return dict(found)

    def export_assets(self, folder: Path) -> list[Path]:
        """See `Workload.export_assets`."""
        with calling(self, f"export_assets({str(folder)!r})"):
            return self._workload.export_assets(folder)

    def _endless(self, batches: Iterator[Batch], member: str) -> Iterator[Batch]:
        for made_count in count():
            with calling(self, member):
                try:
                    batch = next(batches)
                except StopIteration:
                    raise WorkloadError(
                        f"{name_of(self)}: {member} ended after {made_count} batches; data(slot, "
                        "cursor) must return an iterator over the batches "
                        "number cursor, cursor + 1, ... of the slot that goes on without end, for example by starting "
                        "over in another order."
                    ) from None
            yield batch

    def _guarded(self, function: Callable[..., ResultT], member: str) -> Callable[..., ResultT]:
        @wraps(function)
        def guarded(*arguments: Any, **named: Any) -> ResultT:
            with calling(self, member):
                return function(*arguments, **named)

        return guarded

    def _nonsense(self, member: str, found: str, wanted: str) -> WorkloadError:
        return WorkloadError(f"{name_of(self)}: {member} returned {found}; it must return {wanted}.")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
