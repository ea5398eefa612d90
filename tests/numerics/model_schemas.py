"""Schemas of decoders at the sizes that the project trains, unrolled and with the layers stacked."""

from decoupled_diloco.arrays.schema import Schema, TensorSpec


def decoder_schema(
    *, vocabulary: int, width: int, layers: int, hidden: int, heads: int, kv_heads: int, stacked: bool = False
) -> Schema:
    head = width // heads
    per_layer = {
        "attention/query": (width, heads, head),
        "attention/key": (width, kv_heads, head),
        "attention/value": (width, kv_heads, head),
        "attention/out": (heads, head, width),
        "mlp/gate": (width, hidden),
        "mlp/up": (width, hidden),
        "mlp/down": (hidden, width),
        "norm_attention": (width,),
        "norm_mlp": (width,),
    }
    tensors = [TensorSpec("embedder/embedding", (vocabulary, width), rule="avg"), TensorSpec("norm", (width,))]
    for name, shape in per_layer.items():
        if stacked:
            tensors.append(TensorSpec(f"layers/{name}", (layers, *shape), stack_axis=0))
        else:
            tensors += [TensorSpec(f"layers/{layer}/{name}", shape) for layer in range(layers)]
    return Schema(tensors)


def demo_schema(*, stacked: bool = False) -> Schema:
    return decoder_schema(vocabulary=1024, width=64, layers=2, hidden=192, heads=2, kv_heads=1, stacked=stacked)


def schema_19m(*, stacked: bool = False) -> Schema:
    return decoder_schema(vocabulary=8192, width=384, layers=9, hidden=1152, heads=6, kv_heads=2, stacked=stacked)
