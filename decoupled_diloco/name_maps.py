"""Name maps that come with the package, and those of the user."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from decoupled_diloco.arrays.name_map import NameMap, NameMapError, parse_name_map, same_names


def shipped_name_maps() -> tuple[str, ...]:
    """Names of the maps in `presets/maps`, in order."""
    folder = resources.files("decoupled_diloco") / "presets" / "maps"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_name_map(chosen: str) -> NameMap:
    """Returns a name map.

    Args:
        chosen: the name of one that comes with the package, or the path of a TOML file; empty for files that have the
            run's own names.

    Raises:
        NameMapError: there is no such map, it cannot be read, or something is wrong with it.
    """
    if not chosen:
        return same_names()
    if not chosen.endswith(".toml"):
        shipped = shipped_name_maps()
        if chosen not in shipped:
            raise NameMapError(
                [f"there is no name map {chosen!r}; give the path of a .toml file, or one of {', '.join(shipped)}"]
            )
        file = resources.files("decoupled_diloco") / "presets" / "maps" / f"{chosen}.toml"
        return parse_name_map(file.read_text(encoding="utf-8"), chosen)
    try:
        text = Path(chosen).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise NameMapError([f"name map {chosen} cannot be read: {reason}"]) from error
    return parse_name_map(text, chosen)
