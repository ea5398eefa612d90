"""A training loop of your own in a Decoupled DiLoCo run: plain JAX, parameters in a dict.

    decoupled-diloco-syncer --run-file examples/bring_your_own_loop/run.toml
    python examples/bring_your_own_loop/train.py --learner-id alpha      # in two more terminals
    python examples/bring_your_own_loop/train.py --learner-id beta

The lines marked with (*) are all that the run adds to the loop. The parameters are those of a small network that
learns a curve; each learner draws its own points, by slot and cursor, so that a learner that starts again goes on
where its merged work ended. With `peer_listen` they also give their optimizer's state to one that comes back.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import decoupled_diloco

HERE = Path(__file__).parent
BATCH = 64
PEAK_RATE = 0.05
MOMENTUM = 0.9


def initial_params(width: int = 32) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (1, width)) * 3,
        "hidden": jax.random.normal(keys[1], (width, width)) / width**0.5,
        "bias": jnp.zeros(width),
        "out": jax.random.normal(keys[2], (width,)) / width**0.5,
    }


def batch(slot: int, cursor: int) -> tuple[np.ndarray, np.ndarray]:
    """Batch number `cursor` of a slot: a function of the two, and of nothing else."""
    x = np.random.default_rng([slot, cursor]).uniform(-1, 1, (BATCH, 1)).astype(np.float32)
    return x, np.sin(5 * x[:, 0])


def loss_of(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(jnp.tanh(x @ params["embed"]) @ params["hidden"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, velocity, x, y, rate):
    loss, slope = jax.value_and_grad(loss_of)(params, x, y)
    velocity = jax.tree.map(lambda v, s: MOMENTUM * v + s, velocity, slope)
    return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner-id", required=True)
    parser.add_argument("--syncer", default="127.0.0.1:50051")
    options = parser.parse_args()

    params = initial_params()
    velocity = jax.tree.map(jnp.zeros_like, params)
    run = decoupled_diloco.learner(  # (*)
        HERE / "run.toml",
        params,
        learner_id=options.learner_id,
        syncer=options.syncer,
        peer_listen="127.0.0.1:0",
    )
    with run as d:  # (*)
        params, velocity = d.start(params, optimizer_state=velocity)  # (*) the run's parameters, in place of ours
        while not d.finished:  # (*)
            rate = PEAK_RATE * max(0.05, 1 - d.schedule_step / d.policy.total_steps)  # (*) follows the run's step
            params, velocity, loss = train_step(params, velocity, *batch(d.slot, d.cursor), rate)
            params, velocity = d.step_boundary(  # (*) never waits for the network
                params, tokens=BATCH, loss=loss, optimizer_state=velocity
            )
            if d.restart_optimizer:  # (*) the parameters were taken anew, and no peer gave its optimizer's state
                velocity = jax.tree.map(jnp.zeros_like, params)
    print(f"{options.learner_id}: {d.end_reason}; the last loss was {float(loss):.4f}")


if __name__ == "__main__":
    main()
