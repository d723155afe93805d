"""The host's attention on TPU, traced inside islands; no TPU is needed."""

import importlib.util
from pathlib import Path

import pytest

from helpers.aot_config import VOCAB_SIZE, config
from levanter_diloco.commands.compile.aot import abstract_run, tpu_devices
from levanter_diloco.commands.compile.slices import Slice


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot")
@pytest.mark.parametrize("topology", ["v5litepod-1", "v5p-8"])
def test_islands_use_the_splash_kernel(topology: str, tmp_path: Path) -> None:
    # On v5litepod-1, islands of one device, the host would fail; on v5p-8 it would fall back without the kernel.
    with abstract_run(tpu_devices(Slice.of(topology), 2), config(tmp_path, {}), VOCAB_SIZE) as run:
        inner = next(program for program in run.programs if program.name == "inner")
        text = inner.trace().lower().as_text()
    assert "splash" in text and "tpu_custom_call" in text
