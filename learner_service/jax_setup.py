"""Settings of JAX that must stand before it computes for the first time."""

from __future__ import annotations

from pathlib import Path

import jax

from decoupled_diloco.runtime.config import ConfigError


def set_up_jax(cache_path: Path, platform: str, section: str) -> None:
    """Chooses the platform and keeps compiled programs, so that a restart does not compile again.

    A cache that the environment names (JAX_COMPILATION_CACHE_DIR) is left as it is.

    Args:
        cache_path: folder for things that may be deleted; several processes may share it.
        platform: "cpu", "gpu", "tpu", or "auto" for what JAX finds.
        section: where the settings live, for messages.

    Raises:
        ConfigError: there is no such device.
    """
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if jax.config.values.get("jax_compilation_cache_dir") is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_path / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if platform != "auto":
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as error:  # the second one where JAX knows no such backend
            text = " ".join(str(error).split()) or "it has no such backend"
            raise ConfigError(
                f'{section}.platform = "{platform}": JAX finds no such device on this machine ({text}); use "auto" or '
                f'"cpu", or install what JAX needs for it ("jax[cuda12]" for NVIDIA, "jax[tpu]" for TPUs)'
            ) from None
