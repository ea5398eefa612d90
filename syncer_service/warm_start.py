"""Where the first parameters of a run come from, if not from a learner: a model in safetensors, ours or foreign."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragment
from decoupled_diloco.arrays.name_map import NameMapError
from decoupled_diloco.arrays.planner import plan_tensors
from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.name_maps import load_name_map
from decoupled_diloco.safetensors_file import SafetensorsError, SafetensorsFolder

SHOWN_MAX = 40
"""Problems that the message shows."""


class WarmStartError(Exception):
    """A run cannot start from what `run.start_from` names.

    Attributes:
        problems: everything that is wrong, one sentence each.
    """

    def __init__(self, location: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        shown = list(self.problems[:SHOWN_MAX])
        if len(self.problems) > SHOWN_MAX:
            shown.append(f"and {len(self.problems) - SHOWN_MAX} more")
        super().__init__(f'run.start_from = "{location}" cannot be used: ' + "; ".join(shown))


class InitialSource(Protocol):
    """Something that the first version of every fragment can be read from."""

    def theta(self, fragment: Fragment) -> FloatVector:
        """The parameters of a fragment, float32 of `fragment.size` elements; a new array."""
        ...

    def describe(self) -> str:
        """In words, for logs and the status: what it is and where it lies."""
        ...


class SafetensorsSource:
    """A model in safetensors, by way of a name map.

    Only one tensor, or the part of it that a fragment has, is in memory at a time, beside the fragment itself.

    Args:
        location: path or URL of a safetensors file, or of a folder with shards and `model.safetensors.index.json`.
        name_map: name of a map that comes with the package, path of one, or empty for files with the run's own names.
        schema: the run's.

    Raises:
        WarmStartError: names and shapes do not fit; everything that is missing, left over, or of a wrong shape or
            type.
    """

    def __init__(self, location: str, name_map: str, schema: Schema) -> None:
        self._location, self._map_name = location, name_map
        wanted = {spec.name: spec.shape for spec in schema.tensors}
        try:
            self._file = SafetensorsFolder(location)
            self._plans = plan_tensors(self._file.tensors, load_name_map(name_map), wanted)
        except NameMapError as error:
            raise WarmStartError(location, error.problems) from error
        except SafetensorsError as error:
            raise WarmStartError(location, [str(error)]) from error

    def check(self) -> None:
        """Reads everything once, before anything is used.

        Raises:
            WarmStartError: tensors with values that are not finite, all of them; or the files cannot be read.
        """
        problems = []
        for name, plan in self._plans.items():
            try:
                values = plan.read(self._file)
            except SafetensorsError as error:
                raise WarmStartError(self._location, [str(error)]) from error
            count = values.size - int(np.count_nonzero(np.isfinite(values)))
            if count:
                sources = sorted({cell.source for cell in plan.cells})
                origin = "" if sources == [name] else f" (made from {', '.join(map(repr, sources[:3]))})"
                problems.append(
                    f"tensor {name!r}{origin} has {count} of {values.size} values that are not finite in float32"
                )
        if problems:
            raise WarmStartError(self._location, problems)

    def theta(self, fragment: Fragment) -> FloatVector:
        """See `InitialSource.theta`.

        Raises:
            WarmStartError: the files cannot be read any more.
        """
        flat = np.empty(fragment.size, np.float32)
        for piece in fragment.pieces:
            plan = self._plans[piece.tensor]
            try:
                if piece.axis is None:
                    values = plan.read(self._file)
                else:
                    part = plan.read(self._file, piece.axis, piece.start, piece.stop)
                    values = np.moveaxis(part, piece.axis, 0)
            except SafetensorsError as error:
                raise WarmStartError(self._location, [str(error)]) from error
            flat[piece.flat_slice].reshape(piece.flat_shape)[...] = values
        return flat

    def describe(self) -> str:
        """See `InitialSource.describe`."""
        names = f"name map {self._map_name}" if self._map_name else "the run's own names"
        return f"{len(self._plans)} tensors of {self._location}, by {names}"


def check_start(location: str, name_map: str) -> None:
    """What can be said before the first learner has told the schema: the files can be opened, the map can be read.

    Args:
        location: see `SafetensorsSource`.
        name_map: see there.

    Raises:
        WarmStartError: everything of this that is wrong.
    """
    problems: list[str] = []
    try:
        SafetensorsFolder(location)
    except SafetensorsError as error:
        problems.append(str(error))
    try:
        load_name_map(name_map)
    except NameMapError as error:
        problems.extend(error.problems)
    if problems:
        raise WarmStartError(location, problems)


def open_safetensors(location: str, name_map: str, schema: Schema) -> InitialSource:
    """A model to start from, checked to the last value.

    Args:
        location: see `SafetensorsSource`.
        name_map: see there.
        schema: the run's.

    Raises:
        WarmStartError: it cannot be used; everything that is wrong with names, shapes and types, or all tensors with
            values that are not finite.
    """
    source = SafetensorsSource(location, name_map, schema)
    source.check()
    return source
