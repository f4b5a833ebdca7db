"""Without megatron-core, the strategy says what to install; nothing else asks for it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from caldera.config import FSDPConfig
from caldera.engine import ENGINES, EngineOptions
from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.models.pretrained import WeightSource


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_megatron(name: str, *args: Any) -> Any:
        return None if name.startswith("megatron") else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without_megatron)
    module = nn.Linear(2, 2)
    source, options = WeightSource(module, {}), EngineOptions(FSDPConfig())
    with pytest.raises(ConfigError, match=re.escape(install_command("megatron"))):
        ENGINES["megatron"](module, source, torch.device("cpu"), options)


def test_nobody_imports_it_before_it_is_asked_for() -> None:
    program = "import sys, caldera.workers; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
