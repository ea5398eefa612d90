"""Members of the benchmark suite that are programs given as text, for its tests; none of them measures anything."""

import json
import sys

from benchmarks import places
from benchmarks.figures import Figure, Section, Target, of_repetitions
from benchmarks.record import Results
from benchmarks.suite import Member

SECTION = Section(
    "good",
    "A good one",
    "Three repetitions.",
    (
        of_repetitions("speed | best", [1.0, 3.0, 2.0], "GB/s", Target("at least", 1.5), "of three"),
        Figure("lag", 30.0, "ms", Target("at most", 20.0)),
        Figure("count", 7.0, "rounds"),
    ),
    {"tables": [{"title": "Side by side", "columns": ["way", "GB/s"], "rows": [["ours", 1.5], ["theirs", None]]}]},
)
GOOD = f"""
import json, sys
sys.path.insert(0, {str(places.ROOT)!r})
from benchmarks.figures import Section, run
section = Section.from_json(json.loads({json.dumps(json.dumps(SECTION.to_json()))}))
sys.exit(run(lambda quick: section, None))
"""


class FakeMember(Member):
    """A member whose module is a program given as text."""

    def command(self, is_quick, folder, more=()):
        return [sys.executable, "-c", self.arguments[0], *super().command(is_quick, folder, more)[3:]]


def member(name, text, **settings):
    return FakeMember(name, "a test", arguments=(text,), **settings)


def results_of(*sections, is_quick=False, **settings):
    """Results that have just measured these sections."""
    results = Results(is_quick, **settings)
    for section in sections:
        results.add(section)
    return results


def littering(note, last_act="threading.Event().wait()"):
    """A program that puts files wherever members may, starts a process, notes all of it at a path, and does not end."""
    return f"""
import json, os, pathlib, subprocess, sys, tempfile, threading
sys.path.insert(0, {str(places.ROOT)!r})
from benchmarks import places
from benchmarks.tied import tied
child = subprocess.Popen(tied([sys.executable, "-c", "import threading; threading.Event().wait()"]))
folders = [tempfile.mkdtemp(), *(tempfile.mkdtemp(dir=place) for place in (places.shared_memory(), places.disk("")))]
for folder in folders:
    pathlib.Path(folder, "payload").write_bytes(bytes(1000))
new = pathlib.Path({str(note)!r} + ".new")
new.write_text(json.dumps({{"pids": [os.getpid(), child.pid], "folders": folders}}))
new.rename({str(note)!r})
{last_act}
"""
