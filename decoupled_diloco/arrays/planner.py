"""Makes the plan of a conversion by a name map, or says everything that does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from decoupled_diloco.arrays.layout import LayoutError, Shape
from decoupled_diloco.arrays.name_map import NameMap, NameMapError, Rule
from decoupled_diloco.arrays.tensor_plan import FLOAT_KINDS, Cell, Index, PlannedTensor, TensorInfo


@dataclass
class _Planner:
    """Makes a plan and collects what does not fit."""

    have: Mapping[str, TensorInfo]
    rules: tuple[Rule, ...]
    known_sizes: Mapping[str, int]
    wanted: Mapping[str, Shape | None]
    missing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)
    used: dict[str, set[int] | None] = field(default_factory=dict)

    def tensor(self, name: str) -> PlannedTensor | None:
        """The plan of one wanted tensor, or None with a problem noted."""
        shape = self.wanted[name]
        candidates = [(rule, found) for rule in self.rules if (found := rule.target.match(name)) is not None]
        if not candidates:
            self.problems.append(f"tensor {name!r}{_of_shape(shape)} is wanted, and no rule of the map says from what")
            return None
        incomplete: list[tuple[list[str], list[str]]] = []
        for rule, (values, position) in candidates:
            sources = self._sources(rule, values, shape)
            absent = [source for source in sources if source not in self.have]
            if not absent:
                return self._planned(name, rule, values, position, sources)
            incomplete.append((absent, sources))
        absent, sources = min(incomplete, key=lambda each: len(each[0]))
        self.missing[_several(absent)].append(name)
        self.used.update(dict.fromkeys(source for source in sources if source in self.have))
        return None

    def _sources(self, rule: Rule, values: dict[str, int | str], shape: Shape | None) -> list[str]:
        """Names of the tensors that a wanted one is made from."""
        field_name = rule.stacked_field
        if field_name is None:
            return [pattern.fill(values) for pattern in rule.source.patterns]
        pattern, axis = rule.source.patterns[0], rule.target.axis or 0
        if shape is not None and axis < len(shape):
            count = shape[axis]
        else:
            matches = [found for name in self.have if (found := pattern.match(name)) is not None]
            alike = [found for found in matches if all(found[key] == value for key, value in values.items())]
            count = max((int(found[field_name]) + 1 for found in alike), default=1)
        return [pattern.fill({**values, field_name: number}) for number in range(count)]

    def _planned(
        self, name: str, rule: Rule, values: dict[str, int | str], position: int, sources: list[str]
    ) -> PlannedTensor | None:
        shape = self.wanted[name]
        for source in sources:
            if self.have[source].dtype not in FLOAT_KINDS:
                self.used[source] = None
                self.problems.append(
                    f"tensor {source!r} has type {self.have[source].dtype}; parameters must be of "
                    f"{', '.join(FLOAT_KINDS)}"
                )
                return None
        try:
            if rule.stacked_field is not None:
                return self._stacked(name, rule, sources)
            if len(sources) > 1:
                return self._concatenated(name, rule, sources)
            return self._single(name, rule, sources[0], self._part(name, rule, values, position, sources[0]))
        except LayoutError as error:
            shapes = ", ".join(str(self.have[source].shape) for source in sources[:3])
            self.problems.append(
                f"tensor {sources[0]!r} has shape {shapes}, from which {name!r}{_of_shape(shape)} cannot be made: "
                f"{error}"
            )
            self.used.update(dict.fromkeys(sources))
            return None

    def _single(self, name: str, rule: Rule, source: str, index: Index) -> PlannedTensor:
        shape, sizes = self._fitted(rule, _indexed(self.have[source].shape, index), self.wanted[name])
        if index and isinstance(index[-1], int):
            self._use(source, index[-1])
        else:
            self._use(source)
        return PlannedTensor(name, shape, (Cell(rule, source, index, (), sizes),))

    def _stacked(self, name: str, rule: Rule, sources: list[str]) -> PlannedTensor:
        axis, wanted = rule.target.axis or 0, self.wanted[name]
        _check_axis(axis, wanted)
        cells, shapes = [], set()
        for number, source in enumerate(sources):
            each = None if wanted is None else (*wanted[:axis], *wanted[axis + 1 :])
            shape, sizes = self._fitted(rule, self.have[source].shape, each)
            shapes.add(shape)
            self._use(source)
            cells.append(Cell(rule, source, (), (*(slice(None),) * axis, number), sizes))
        if len(shapes) > 1:
            raise LayoutError(f"tensors of different shapes, {sorted(shapes)}, cannot be stacked")
        (shape,) = shapes
        _check_axis(axis, (*shape, 0))
        return PlannedTensor(name, (*shape[:axis], len(sources), *shape[axis:]), tuple(cells))

    def _concatenated(self, name: str, rule: Rule, sources: list[str]) -> PlannedTensor:
        axis, wanted = rule.target.axis or 0, self.wanted[name]
        fitted = [self._fitted(rule, self.have[source].shape, None) for source in sources]
        for shape, _ in fitted:
            _check_axis(axis, shape)
        ends = list(accumulate(shape[axis] for shape, _ in fitted))
        cells = []
        for source, (shape, sizes), end in zip(sources, fitted, ends, strict=True):
            self._use(source)
            place = (*(slice(None),) * axis, slice(end - shape[axis], end))
            cells.append(Cell(rule, source, (), place, sizes))
        around = {(*shape[:axis], 0, *shape[axis + 1 :]) for shape, _ in fitted}
        first = fitted[0][0]
        total = (*first[:axis], ends[-1], *first[axis + 1 :])
        if len(around) > 1 or (wanted is not None and wanted != total):
            raise LayoutError(f"joined along axis {axis} they give {total}" if len(around) == 1 else "they do not fit")
        return PlannedTensor(name, total, tuple(cells))

    def _part(self, name: str, rule: Rule, values: dict[str, int | str], position: int, source: str) -> Index:
        """What to read of a tensor that is taken apart; () where it is not."""
        axis, shape = rule.source.axis or 0, self.have[source].shape
        before = (slice(None),) * axis
        if (field_name := rule.taken_apart_field) is not None:
            _check_axis(axis, shape)
            number = int(values[field_name])
            if number >= shape[axis]:
                raise LayoutError(f"its axis {axis} has {shape[axis]} slices, and number {number} is wanted")
            return (*before, number)
        if len(rule.target.patterns) == 1:
            return ()
        _check_axis(axis, shape)
        extents = self._shares(rule, values, axis, shape)
        start = sum(extents[:position])
        return (*before, slice(start, start + extents[position]))

    def _shares(self, rule: Rule, values: dict[str, int | str], axis: int, shape: Shape) -> list[int]:
        """Extents of the parts of a tensor that is split: as the map says, or as the wanted shapes do."""
        if rule.parts:
            if shape[axis] % sum(rule.parts):
                raise LayoutError(f"its axis {axis} of {shape[axis]} cannot be split in the ratio {list(rule.parts)}")
            return [shape[axis] * part // sum(rule.parts) for part in rule.parts]
        names = [pattern.fill(values) for pattern in rule.target.patterns]
        wanted = [self.wanted.get(name) for name in names]
        extents = []
        for each in wanted:
            if each is None:
                raise LayoutError("how it is to be split is not known; give parts = [...] in the map")
            back = each
            if rule.layout is not None:
                layout = rule.layout.reversed()
                back = layout.shape_after(layout.sizes(self.known_sizes, each))
            extents.append(back[axis])
        if sum(extents) != shape[axis]:
            raise LayoutError(f"its axis {axis} has {shape[axis]}, and the parts {names} take {extents}")
        return extents

    def _fitted(self, rule: Rule, shape: Shape, wanted: Shape | None) -> tuple[Shape, dict[str, int]]:
        """The shape that comes out, and the extents of the layout's axes."""
        sizes = {} if rule.layout is None else rule.layout.sizes(self.known_sizes, shape, wanted)
        result = shape if rule.layout is None else rule.layout.shape_after(sizes)
        if wanted is not None and result != wanted:
            raise LayoutError(f"it would have shape {result}")
        return result, sizes

    def _use(self, source: str, number: int | None = None) -> None:
        if number is None:
            self.used[source] = None
        else:
            slices = self.used.setdefault(source, set())
            if slices is not None:
                slices.add(number)


def plan_tensors(
    have: Mapping[str, TensorInfo],
    name_map: NameMap,
    wanted: Mapping[str, Shape] | None = None,
    exports: bool = False,
) -> dict[str, PlannedTensor]:
    """Says how each wanted tensor is made.

    Args:
        have: the tensors that are there.
        name_map: the map.
        wanted: shapes by name; None to make whatever the map makes of `have`.
        exports: whether the map is read backwards, from the run to the file.

    Returns:
        A plan for each wanted tensor, in order of their names.

    Raises:
        NameMapError: everything that is missing, left over or of a wrong shape or type.
    """
    rules = tuple(rule.reversed() for rule in name_map.rules) if exports else name_map.rules
    ignored = () if exports else name_map.ignored
    present = {name: info for name, info in have.items() if not any(each.match(name) is not None for each in ignored)}
    targets: Mapping[str, Shape | None] = _derived(present, rules) if wanted is None else wanted
    planner = _Planner(have, rules, name_map.sizes, targets)
    plans = [planner.tensor(name) for name in sorted(targets)]
    problems = [
        f"tensor {needed} is missing in the file, from which {_several(names)} should be made"
        if not exports
        else f"tensor {needed} is missing in the run, from which {_several(names)} should be made"
        for needed, names in planner.missing.items()
    ]
    problems += planner.problems
    problems += _left_over(present, planner.used, rules, name_map.name, exports)
    if problems:
        raise NameMapError(problems)
    return {plan.name: plan for plan in plans if plan is not None}


def _derived(have: Mapping[str, TensorInfo], rules: Iterable[Rule]) -> dict[str, None]:
    """Names of all that the rules make of the tensors."""
    names: dict[str, None] = {}
    for source, info in have.items():
        for rule in rules:
            if (found := rule.source.match(source)) is None:
                continue
            values: dict[str, int | str] = found[0]
            if (part := rule.taken_apart_field) is not None:
                axis = rule.source.axis or 0
                choices = [{**values, part: number} for number in range((*info.shape, *[1] * (axis + 1))[axis])]
            else:
                choices = [values]
            names.update({pattern.fill(choice): None for choice in choices for pattern in rule.target.patterns})
            break
    return names


def _left_over(
    have: Mapping[str, TensorInfo],
    used: Mapping[str, set[int] | None],
    rules: Iterable[Rule],
    map_name: str,
    exports: bool,
) -> list[str]:
    place = "run" if exports else "file"
    problems = []
    for name, info in have.items():
        if name not in used:
            problems.append(
                f"tensor {name!r} of shape {info.shape} in the {place} is not used by {map_name}"
                + ("" if exports else "; list it under ignore if nobody wants it")
            )
        elif (numbers := used[name]) is not None:
            axis = next(rule.source.axis or 0 for rule in rules if rule.source.match(name))
            if len(numbers) < info.shape[axis]:
                problems.append(
                    f"tensor {name!r} of shape {info.shape} in the {place} has {info.shape[axis]} slices along axis "
                    f"{axis}, of which only {len(numbers)} are used"
                )
    return problems


def _indexed(shape: Shape, index: Index) -> Shape:
    """The shape of `array[index]` for an array of this shape; only the last entry of the index selects."""
    if not index:
        return shape
    axis, last = len(index) - 1, index[-1]
    middle = (last.stop - last.start,) if isinstance(last, slice) else ()
    return (*shape[:axis], *middle, *shape[axis + 1 :])


def _check_axis(axis: int, shape: Shape | None) -> None:
    if shape is not None and axis >= len(shape):
        raise LayoutError(f"there is no axis {axis} in shape {shape}")


def _of_shape(shape: Shape | None) -> str:
    return "" if shape is None else f" of shape {shape}"


def _several(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
