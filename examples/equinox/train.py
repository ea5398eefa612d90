"""An equinox module in a Decoupled DiLoCo run: the module itself is the pytree of parameters.

    pip install equinox
    decoupled-diloco-syncer --run-file examples/equinox/run.toml
    python examples/equinox/train.py --learner-id alpha      # in two more terminals
    python examples/equinox/train.py --learner-id beta

Its floating-point arrays are exchanged; activation functions and other leaves stay as they are.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax

import decoupled_diloco

HERE = Path(__file__).parent
BATCH = 64
OPTIMIZER = optax.adamw(1e-2)


def batch(slot: int, cursor: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of two interleaved spirals, and which of the two each is on."""
    generator = np.random.default_rng([slot, cursor])
    arm = generator.integers(0, 2, BATCH)
    turn = generator.uniform(0.5, 2, BATCH)
    angle = 4 * turn + np.pi * arm
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) + 0.03 * generator.standard_normal((BATCH, 2))
    return points.astype(np.float32), arm.astype(np.float32)


@eqx.filter_jit
def train_step(model, state, points, arm):
    @eqx.filter_value_and_grad
    def loss_of(model):
        return optax.sigmoid_binary_cross_entropy(jax.vmap(model)(points), arm).mean()

    loss, slope = loss_of(model)
    updates, state = OPTIMIZER.update(slope, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


def fresh_state(model):
    return OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner-id", required=True)
    parser.add_argument("--syncer", default="127.0.0.1:50051")
    options = parser.parse_args()

    model = eqx.nn.MLP(2, "scalar", 32, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    state = fresh_state(model)
    with decoupled_diloco.learner(HERE / "run.toml", model, learner_id=options.learner_id, syncer=options.syncer) as d:
        model = d.start(model)
        while not d.finished:
            model, state, loss = train_step(model, state, *batch(d.slot, d.cursor))
            model = d.step_boundary(model, tokens=BATCH, loss=loss)
            if d.restart_optimizer:
                state = fresh_state(model)
    print(f"{options.learner_id}: {d.end_reason}; the last loss was {float(loss):.4f}")


if __name__ == "__main__":
    main()
