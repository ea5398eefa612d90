"""A flax.linen model with an optax optimizer and a TrainState in a Decoupled DiLoCo run.

    decoupled-diloco-syncer --run-file examples/flax_linen/run.toml
    python examples/flax_linen/train.py --learner-id alpha      # in two more terminals
    python examples/flax_linen/train.py --learner-id beta

The model tells whether four digits add up to more than 18. The deltas of its embedding are averaged, those of all other
tensors keep their length (the default goes by the name: "embed").
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import decoupled_diloco

HERE = Path(__file__).parent
BATCH = 64


class Adder(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, digits):
        x = nn.Embed(10, self.width, name="embed")(digits).reshape(len(digits), -1)
        for layer in range(2):
            x = nn.gelu(nn.Dense(self.width, name=f"dense_{layer}")(x))
        return nn.Dense(1, name="head")(x)[:, 0]


def batch(slot: int, cursor: int) -> tuple[np.ndarray, np.ndarray]:
    digits = np.random.default_rng([slot, cursor]).integers(0, 10, (BATCH, 4))
    return digits, (digits.sum(1) > 18).astype(np.float32)


@jax.jit
def train_step(state: TrainState, digits: jax.Array, is_more: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params):
        logits = state.apply_fn({"params": params}, digits)
        return optax.sigmoid_binary_cross_entropy(logits, is_more).mean()

    loss, slope = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=slope), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner-id", required=True)
    parser.add_argument("--syncer", default="127.0.0.1:50051")
    options = parser.parse_args()

    model, optimizer = Adder(), optax.adamw(3e-3)
    params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    with decoupled_diloco.learner(HERE / "run.toml", params, learner_id=options.learner_id, syncer=options.syncer) as d:
        state = state.replace(params=d.start(params))
        while not d.finished:
            state, loss = train_step(state, *batch(d.slot, d.cursor))
            state = state.replace(params=d.step_boundary(state.params, tokens=BATCH, loss=loss))
            if d.restart_optimizer:
                state = state.replace(opt_state=optimizer.init(state.params))
    print(f"{options.learner_id}: {d.end_reason}; the last loss was {float(loss):.4f}")


if __name__ == "__main__":
    main()
