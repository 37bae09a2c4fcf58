"""Packaging. Exact versions known to work together are in requirements/, tool settings in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md")

setup(
    name="hybridflow",
    version="0.1.0",
    description="Reinforcement-learning post-training of language models, written as dataflow",
    long_description=README.read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["hybridflow", "hybridflow.*"]),
    package_data={"hybridflow": ["py.typed"]},
    entry_points={"console_scripts": ["hybridflow = hybridflow.cli:main"]},
    install_requires=[
        "cloudpickle>=3",
        "datasets>=4",
        "hydra-core>=1.3.2",
        "jinja2>=3.1",
        "math-verify>=0.9",
        "matplotlib>=3.8",
        "numpy>=2",
        "omegaconf>=2.3.1",
        "pyarrow>=17",
        "ray>=2.50",
        "reasoning-gym>=0.1.25",
        "remote-pdb>=2.1",
        "rich>=13",
        "safetensors>=0.5",
        "tensorboard>=2.18",
        "tokenizers>=0.22",
        "torch>=2.9",
        "transformers>=5",
    ],
    extras_require={
        "vllm": ["vllm"],
        "sglang": ["sglang"],
        "megatron": ["megatron-core>=0.16"],
        "dev": [
            "accelerate",
            "gguf",
            "hypothesis",
            "import-linter",
            "mkdocs-material",
            "mkdocstrings[python]",
            "mypy",
            "psutil",
            "pytest",
            "pytest-timeout",
            "ruff",
        ],
    },
)
