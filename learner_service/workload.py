"""What is trained: the one interface between a run and a model with its data.

A run file names a *factory*::

    [workload]
    factory = "my_package.my_model:factory"
    options = { width = 128 }

The learner (and the evaluator) calls `factory(context)` once and gets an object that satisfies `Workload`.
The same factory with the same options runs in every process of a run, so everything here has to be a function
of its arguments: no wall clock, no host name, no process id. `learner_service.workloads.synthetic` is the
shortest complete example, `learner_service.workloads.language_model` the useful one.

Seven members are required: `init`, `loss`, `optimizer`, `learning_rate`, `data`, `batch_tokens`, `evaluate`.
The others have defaults in `WorkloadDefaults`; derive from it, or leave them out: `load_workload` completes
what a plain class does not define.

Every mistake that a user can make on the way to a workload arrives as one `WorkloadError`, whose message is
one paragraph that names the setting, its value and what would be right.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import jax
    import optax
    from jax.sharding import Mesh, NamedSharding

Params = Any
"""A pytree of float32 arrays. Its key paths, joined by "/", are the tensors' names everywhere in a run."""

Batch = Any
"""A pytree of arrays with a leading batch axis, as `loss` takes it."""


class WorkloadError(Exception):
    """A workload cannot be had, or cannot be had with these options.

    The message is one paragraph for the person who wrote the run file: the setting, its value, what would be
    right.
    """


@dataclasses.dataclass(frozen=True)
class WorkloadContext:
    """What a factory is told about the run; the same in every process of the run but for `cache_dir`.

    Attributes:
        seed: the run's seed (>= 0), from which all of a workload's randomness follows.
        slot_count: number of data slots (>= 1) that the data is divided into; usually the number of learners.
        total_steps: length of the run in global steps (>= 1), for learning-rate schedules.
        cache_dir: folder of this machine for things that are cheaper to keep than to make again. Several
            processes share it: write under a temporary name and rename.
        options: the free table `[workload] options` of the run file.
    """

    seed: int
    slot_count: int
    total_steps: int
    cache_dir: Path
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class MergeRule:
    """How the deltas of several learners become one, for one tensor.

    Attributes:
        rule: "rda" keeps the mean length of the deltas along their mean direction (radial-directional
            averaging); "avg" is the weighted mean, right for tensors of which a batch touches only some rows.
        stack_axis: the axis along which independent tensors are stacked (scanned layers, experts), so that
            each slice is merged and placed on its own; None for an ordinary tensor.
    """

    rule: Literal["rda", "avg"]
    stack_axis: int | None = None


class MeshLayout(NamedTuple):
    """How one learner spreads itself over its own devices.

    Attributes:
        mesh: the devices.
        sharding: from a tensor's name and shape to its placement, for parameters and for the optimizer's
            moments.
        batch_sharding: placement of every leaf of a batch; None replicates it.
    """

    mesh: Mesh
    sharding: Callable[[str, tuple[int, ...]], NamedSharding]
    batch_sharding: NamedSharding | None = None


def default_merge_rule(name: str, shape: tuple[int, ...]) -> MergeRule:
    """Avg for embeddings (names that contain "embed", in any case), RDA for everything else; nothing stacked.

    Source: "embeddings use Avg", the paper's merge-rule ablation (RDA + Avg for embeddings).
    """
    del shape
    return MergeRule("avg" if "embed" in name.lower() else "rda")


class Workload(Protocol):
    """A model, its optimizer, its data and its evaluation."""

    def init(self, seed: int) -> Params:
        """Returns the initial parameters: a pytree of float32 arrays, a function of `seed` alone."""
        ...

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the mean loss of the batch, a float32 scalar. Pure, and traced by `jax.jit`."""
        ...

    def optimizer(self) -> optax.GradientTransformation:
        """Returns the inner optimizer *at learning rate 1*, clipping and weight decay included.

        The learner multiplies its updates by `learning_rate(...)` before it applies them, so that the rate
        can follow the run's global step instead of the optimizer's own count.
        """
        ...

    def learning_rate(self, schedule_step: int) -> float:
        """Returns the inner learning rate at a step of the run's schedule.

        Args:
            schedule_step: global step (>= 0) that this learner has reached; a late joiner starts in the
                middle. May pass `context.total_steps` by a little at the end of a run.
        """
        ...

    def data(self, slot: int, cursor: int) -> Iterator[Batch]:
        """Yields the batches number `cursor`, `cursor + 1`, ... of a data slot, without end.

        Batch number n of a slot is a function of (seed, slot, n) alone: a replacement that continues at n
        sees what the lost learner would have seen. Starting at any cursor must be cheap.

        Args:
            slot: >= 0. Slots below `context.slot_count` share the data among them; later ones may overlap
                with them.
            cursor: >= 0, number of the first batch.
        """
        ...

    def batch_tokens(self, batch: Batch) -> int:
        """Returns how many tokens (or examples: the run's unit of work, > 0) the learner gets credit for."""
        ...

    def evaluate(self, params: Params) -> dict[str, float]:
        """Returns figures on held-out data: "loss" always, "bits_per_byte" for text. Deterministic."""
        ...

    def merge_rule(self, name: str, shape: tuple[int, ...]) -> MergeRule:
        """Returns how deltas of the tensor `name` are merged. Default: `default_merge_rule`."""
        ...

    def mesh(self) -> MeshLayout | None:
        """Returns how to spread over this learner's devices; None (the default) uses one device."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """Returns named digests of what all processes of a run must have in common beyond the run file.

        For example the tokenizer's: two learners that map text to different token numbers must not meet. The
        learner service shows both sides where they differ. Default: nothing.
        """
        ...

    def export_assets(self, folder: Path) -> list[Path]:
        """Writes what a user of the exported model needs beside it (a tokenizer); returns the paths written.

        Args:
            folder: an existing folder, the one that holds the exported model. Default: writes nothing.
        """
        ...


class WorkloadDefaults:
    """Defaults of the optional members of `Workload`; derive from it."""

    def merge_rule(self, name: str, shape: tuple[int, ...]) -> MergeRule:
        """See `Workload.merge_rule`."""
        return default_merge_rule(name, shape)

    def mesh(self) -> MeshLayout | None:
        """See `Workload.mesh`."""
        return None

    def fingerprint(self) -> dict[str, str]:
        """See `Workload.fingerprint`."""
        return {}

    def export_assets(self, folder: Path) -> list[Path]:
        """See `Workload.export_assets`."""
        del folder
        return []


REQUIRED_MEMBERS = ("init", "loss", "optimizer", "learning_rate", "data", "batch_tokens", "evaluate")
OPTIONAL_MEMBERS = ("merge_rule", "mesh", "fingerprint", "export_assets")


def load_workload(factory: str, context: WorkloadContext) -> Workload:
    """Imports a factory, calls it and checks what it returns.

    The current folder is searched after the installed packages, so that `my_model.py` beside the run file is
    found by every command.

    Args:
        factory: "package.module:factory", the run file's `workload.factory`.
        context: handed to the factory.

    Returns:
        A complete `Workload`: optional members that the factory's object does not define are filled in.

    Raises:
        WorkloadError: the name has the wrong form, the import fails, the attribute is absent or not callable,
            the factory raises, or its result lacks a required member.
    """
    build = import_attribute(factory, "workload.factory")
    if not callable(build):
        raise WorkloadError(
            f"workload.factory = {factory!r} names a {type(build).__name__}, which cannot be called; name a "
            "function (or class) that takes one WorkloadContext and returns a workload."
        )
    try:
        workload = build(context)
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"workload.factory = {factory!r} was found but raised {described(error)} when it was called "
            f"with options {dict(context.options)!r}; correct workload.options or the factory."
        ) from error
    return _completed(workload, factory)


def import_attribute(name: str, field: str) -> object:
    """Imports the object that "package.module:attribute" names (dots in the attribute are followed).

    Args:
        name: what the user wrote.
        field: the setting in which it was written, for the message.

    Raises:
        WorkloadError: wrong form, import failure, or no such attribute.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise WorkloadError(
            f"{field} = {name!r} is not of the form 'package.module:attribute', such as "
            "'learner_service.workloads.language_model:factory'."
        )
    found: object = _imported(module_name, name, field)
    for part in path.split("."):
        if not hasattr(found, part):
            public = [entry for entry in dir(found) if not entry.startswith("_")]
            raise WorkloadError(
                f"{field} = {name!r}: {getattr(found, '__name__', module_name)!r} has no attribute "
                f"{part!r}; it has "
                f"{', '.join(public[:20]) or 'no public names'}{', ...' if len(public) > 20 else ''}."
            )
        found = getattr(found, part)
    return found


def _imported(module_name: str, name: str, field: str) -> object:
    """Imports a module, and tells apart: not there, needs something that is not there, broken."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise WorkloadError(
                f"{field} = {name!r}: there is no module {missing!r} among the installed packages of "
                f"{sys.executable} or in the current folder {here}; correct the name, install the package, "
                "or start in the folder that has it."
            ) from error
        raise WorkloadError(
            f"{field} = {name!r}: module {module_name!r} was found, but it needs module {missing!r}, which "
            f"is not installed for {sys.executable}; install it."
        ) from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may call sys.exit
        raise WorkloadError(
            f"{field} = {name!r}: module {module_name!r} was found but raised {described(error)} while it "
            "was imported; correct the module."
        ) from error


def described(error: BaseException) -> str:
    """An exception in words: type, text, and the line that raised it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    text = " ".join(str(error).split()) or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


class _Completed(WorkloadDefaults):
    """A workload whose optional members are filled in from the defaults."""

    def __init__(self, workload: object) -> None:
        self._workload = workload
        for member in OPTIONAL_MEMBERS:
            if callable(own := getattr(workload, member, None)):
                setattr(self, member, own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)


def _completed(workload: object, factory: str) -> Workload:
    """Checks the required members and fills in the optional ones."""
    missing = [name for name in REQUIRED_MEMBERS if not callable(getattr(workload, name, None))]
    if missing:
        raise WorkloadError(
            f"workload.factory = {factory!r} returned a {type(workload).__name__} without the method"
            f"{'s' if len(missing) > 1 else ''} {', '.join(missing)}; a workload needs "
            f"{', '.join(REQUIRED_MEMBERS)} (see learner_service.workload.Workload)."
        )
    if all(callable(getattr(workload, name, None)) for name in OPTIONAL_MEMBERS):
        return cast(Workload, workload)
    return cast(Workload, _Completed(workload))
