"""The server: makes one round trip each time that the line says so."""

from __future__ import annotations

import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from benchmarks.peers.loopback import Line, dial

POLL_SECONDS = 0.1

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs until the line ends."""
    line = Line(dial(str(context.run_config["address"])))
    payload = np.random.default_rng(0).standard_normal(int(str(context.run_config["count"])), np.float32)
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(POLL_SECONDS)
    line.say("ready")
    while line.hear() == "go":
        started = time.perf_counter()
        there = RecordDict({"arrays": ArrayRecord([payload])})
        (reply,) = grid.send_and_receive([Message(there, dst_node_id=nodes[0], message_type="query")])
        (back,) = reply.content.array_records["arrays"].to_numpy_ndarrays()
        seconds = time.perf_counter() - started
        line.say([seconds, bool(np.array_equal(back, payload))])
