"""Generates the Python stubs of protos/: `python tools/generate_protos.py [OUT]` (default: the repository).

The stubs are committed, so that users need no protoc; tests/tidy/test_proto_drift.py generates them into an
empty folder and compares.
"""

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> list[Path]:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every proto file under `out`.

    Args:
        out: folder that receives the tree `decoupled_diloco/v1/...`; made if absent.

    Returns:
        The written files, sorted.

    Raises:
        SystemExit: protoc refused a file; its own message is on stderr.
    """
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    out.mkdir(parents=True, exist_ok=True)
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(status)
    package = out / "decoupled_diloco" / "v1" / "__init__.py"
    package.write_text('"""Generated from protos/ by `make proto`; never edited by hand."""\n')
    stems = [source.removesuffix(".proto") for source in sources]
    return sorted([package, *(out / (stem + suffix) for stem in stems for suffix in SUFFIXES)])


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT):
        print(path)
