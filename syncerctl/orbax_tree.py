"""Orbax trees: nested dictionaries of arrays, as MaxText and other JAX trainers keep them.

A tensor's name is its path in the tree, joined by "/". Needs the learner extra; the package is imported only when
a tree is opened or written.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.tensor_plan import Index, TensorInfo
from decoupled_diloco.runtime.config import ConfigError

ITEM_FOLDERS: Final = ("items", "default")
"""Where a checkpoint of several items keeps the tree."""
_METADATA_FILE: Final = "_METADATA"


class OrbaxTree:
    """A tree on disk, read one array at a time.

    Args:
        location: folder of the tree, or of one step of a checkpoint manager.

    Attributes:
        location: the folder of the tree.
        tensors: the arrays by name.

    Raises:
        ConfigError: there is no tree, it cannot be read, or Orbax is not installed.
    """

    def __init__(self, location: str) -> None:
        self._orbax = _orbax()
        self.location = _tree_folder(location)
        self._checkpointer = self._orbax.PyTreeCheckpointer()
        try:
            tree = self._checkpointer.metadata(self.location).item_metadata.tree
        except Exception as error:  # Orbax raises what the store below it raises
            raise ConfigError(f"{location} cannot be read as an Orbax tree: {_described(error)}") from error
        self._tree: Any = tree
        self._paths = {"/".join(map(str, path)): path for path, _ in _leaves(tree)}
        self.tensors = {
            "/".join(map(str, path)): TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype).name)
            for path, leaf in _leaves(tree)
            if getattr(leaf, "shape", None) is not None and getattr(leaf, "dtype", None) is not None
        }
        self._newest: tuple[str, npt.NDArray[Any]] | None = None

    def read(self, name: str, index: Index = ()) -> npt.NDArray[Any]:
        """An array, or a part of it. The newest one is kept, since a stacked array is read slice by slice.

        Raises:
            ConfigError: it cannot be read.
        """
        if self._newest is None or self._newest[0] != name:
            self._newest = None
            self._newest = (name, self._restored(name))
        return self._newest[1][index]

    def _restored(self, name: str) -> npt.NDArray[Any]:
        path, placeholder = self._paths[name], self._orbax.PLACEHOLDER
        arguments = self._orbax.args.PyTreeRestore(
            item=_only(self._tree, path, 0, placeholder),
            restore_args=_only(self._tree, path, self._orbax.RestoreArgs(restore_type=np.ndarray), placeholder),
        )
        try:
            found = self._checkpointer.restore(self.location, args=arguments)
        except Exception as error:
            raise ConfigError(f"{name!r} of {self.location} cannot be read: {_described(error)}") from error
        for key in path:
            found = found[key]
        return np.asarray(found)


def write_orbax(location: str, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes arrays as a tree; the parts of a name between "/" are the keys.

    Raises:
        ConfigError: there is something already, a name is also the beginning of another one, the folder cannot be
            written, or Orbax is not installed.
    """
    orbax = _orbax()
    tree: dict[str, Any] = {}
    for name, array in sorted(tensors.items()):
        *folders, last = name.split("/")
        below = tree
        for key in folders:
            below = below.setdefault(key, {})
            if not isinstance(below, dict):
                raise ConfigError(f"tensor {name!r} would lie below another tensor; Orbax has one or the other")
        below[last] = array
    path = location if "://" in location else str(Path(location).absolute())
    try:
        with orbax.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
    except Exception as error:
        raise ConfigError(f"{location} cannot be written as an Orbax tree: {_described(error)}") from error


def _orbax() -> Any:
    """The package, with JAX on the CPU: converting needs no accelerator, and must not take one away from a learner.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import jax
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Orbax trees need the learner extra, of which {error.name} is not installed here: "
            "pip install 'decoupled-diloco[learner]'"
        ) from error
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns there of files that need not exist
    return orbax.checkpoint


def _tree_folder(location: str) -> str:
    if "://" in location:
        return location
    folder = Path(location).absolute()
    for candidate in (folder, *(folder / item for item in ITEM_FOLDERS)):
        if (candidate / _METADATA_FILE).is_file():
            return str(candidate)
    steps = sorted((path.name for path in folder.glob("*") if path.name.isdigit()), key=int) if folder.is_dir() else []
    hint = f"; it has the steps {', '.join(steps)}: give one of them, such as {folder / steps[-1]}" if steps else ""
    raise ConfigError(
        f"{location} is neither a safetensors file or folder nor an Orbax tree (no {_METADATA_FILE} in it){hint}"
    )


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf with its path."""
    if isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from _leaves(below, (*path, key))
    elif isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        for key, below in zip(itertools.count(), tree):
            yield from _leaves(below, (*path, key))
    else:
        yield path, tree


def _only(tree: Any, path: tuple[Any, ...], value: Any, placeholder: Any) -> Any:
    """The tree with `value` at the end of the path and the placeholder at every other leaf."""

    def below(key: Any, branch: Any) -> Any:
        if path[:1] == (key,):
            return _only(branch, path[1:], value, placeholder)
        return _only(branch, (), placeholder, placeholder)

    if isinstance(tree, Mapping):
        return {key: below(key, branch) for key, branch in tree.items()}
    if type(tree) in (list, tuple):
        return [below(key, branch) for key, branch in enumerate(tree)]
    return value


def _described(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
