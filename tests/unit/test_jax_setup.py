"""Settings of JAX: a device that is not there is a setting."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from decoupled_diloco.runtime.config import ConfigError
from learner_service.jax_setup import set_up_jax


def test_a_platform_without_a_device_is_named_with_what_would_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices() -> object:
        raise RuntimeError("Unable to initialize backend 'cuda':\nno device")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(ConfigError) as raised:
        set_up_jax(tmp_path, "gpu", "learner")
    text = str(raised.value)
    assert text.startswith('learner.platform = "gpu": JAX finds no such device')
    assert "backend 'cuda': no device" in text
