"""The language model with parameters and batches spread over the devices of one host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from decoupled_diloco.arrays.tree import ParameterTree
from learner_service.workload import WorkloadContext, load_workload

options = {"text": sys.argv[1], "tokenizer": "bytes", "d_model": 16, "layer_count": 1, "ff": 24, "head_dim": 8,
           "sequence_length": 16, "eval_windows": 20, "fsdp_device_count": 4}
context = WorkloadContext(seed=1, slot_count=1, total_steps=10, cache_dir=Path(sys.argv[1]).parent, options=options)
workload = load_workload("learner_service.workloads.language_model:factory", context)
layout = workload.mesh()
params, batch = workload.init(0), next(workload.data(0, 0))
tree = ParameterTree(params, workload.merge_rule)
spread = {name: jax.device_put(leaf, layout.sharding(name, leaf.shape)) for name, leaf in tree.leaves(params).items()}
step = jax.jit(jax.value_and_grad(workload.loss))
here = step(params, batch)
there = step(tree.replace(params, spread), jax.device_put(batch, layout.batch_sharding))
differences = jax.tree.map(lambda a, b: float(abs(jax.device_get(a) - jax.device_get(b)).max()), here, there)
print(json.dumps({
    "pieces": {name: len({str(shard.index) for shard in leaf.addressable_shards}) for name, leaf in spread.items()},
    "difference": max(jax.tree.leaves(differences)),
    "figures": [workload.evaluate(params), workload.evaluate(tree.replace(params, spread))],
}))
"""


@pytest.mark.slow
def test_four_devices_compute_what_one_does(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "text.txt")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["pieces"]["layer_00/attention/query"] == 4
    assert answer["pieces"]["embedding"] == 4
    assert answer["difference"] < 1e-5
    here, there = answer["figures"]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
