"""A tiny tree as MaxText saves one for Gemma: the real names, scanned layers, random values.

    python examples/maxtext_tree/build_tree.py runs/maxtext_tree/checkpoint

Where a model was trained with MaxText, its checkpoint takes the place of this one.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

VOCABULARY, WIDTH, LAYERS, FF = 257, 64, 3, 128  # one more than there are bytes: the end of a text
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def maxtext_tree(seed: int) -> dict:
    """What MaxText calls its state: parameters, the inner optimizer's moments, the step."""
    generator = np.random.default_rng(seed)

    def kernel(*shape: int, fan_in: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)

    def scale(*shape: int) -> np.ndarray:
        return generator.uniform(0.9, 1.1, shape).astype(np.float32)

    layers = {
        "pre_self_attention_norm": {"scale": scale(WIDTH, LAYERS)},
        "self_attention": {
            "query": {"kernel": kernel(WIDTH, LAYERS, HEADS, HEAD_DIM, fan_in=WIDTH * HEAD_DIM)},
            "key": {"kernel": kernel(WIDTH, LAYERS, KV_HEADS, HEAD_DIM, fan_in=WIDTH)},
            "value": {"kernel": kernel(WIDTH, LAYERS, KV_HEADS, HEAD_DIM, fan_in=WIDTH)},
            "out": {"kernel": kernel(HEADS, LAYERS, HEAD_DIM, WIDTH, fan_in=HEADS * HEAD_DIM)},
        },
        "pre_ffw_norm": {"scale": scale(WIDTH, LAYERS)},
        "mlp": {
            "wi_0": {"kernel": kernel(WIDTH, LAYERS, FF, fan_in=WIDTH)},
            "wi_1": {"kernel": kernel(WIDTH, LAYERS, FF, fan_in=WIDTH)},
            "wo": {"kernel": kernel(FF, LAYERS, WIDTH, fan_in=FF)},
        },
    }
    params = {
        "token_embedder": {"embedding": kernel(VOCABULARY, WIDTH, fan_in=4)},
        "decoder": {"layers": layers, "decoder_norm": {"scale": scale(WIDTH)}},
    }
    moments = {"mu": {"params": params}, "nu": {"params": params}, "count": np.array(1000, np.int32)}
    return {"params": {"params": params}, "opt_state": moments, "step": np.array(1000, np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    target = options.folder.absolute() / "1000" / "items"  # MaxText names the folder of each step so
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(target, maxtext_tree(seed=0))
    print(f"a tree of {LAYERS} layers is in {options.folder / '1000'}")


if __name__ == "__main__":
    main()
