"""Package metadata, entry points and extras."""

from setuptools import find_packages, setup

setup(
    name="megatron-gvpo",
    version="0.1.0",
    description="Post-training of language models on Megatron-Core: GVPO, GVPO++, TV-OPD, GUPO",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_gvpo", "megatron_gvpo.*"]),
    package_data={"megatron_gvpo": ["**/*.json", "**/*.template", "**/*.html"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=4.57",
        "safetensors",
        "mbridge>=0.15.1",
        "pydantic>=2.7",
        "pyyaml",
        "httpx",
        "tenacity",
        "typer",
        "rich",
        "wandb",
        "matplotlib",
        "numpy",
        "pyarrow",
        "psutil",  # megatron-core's checkpoint writer needs it without declaring it
        "einops",  # as mbridge does
        "math-verify",
        "reasoning-gym",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "dev": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "basedpyright"],
    },
    entry_points={
        "console_scripts": ["megatron-gvpo = megatron_gvpo.cli:main"],
        # The contract kit: `pytest --objective NAME`. The name is the module's, so that `-p` finds the same plug-in.
        "pytest11": ["megatron_gvpo.objectives.pytest_plugin = megatron_gvpo.objectives.pytest_plugin"],
    },
)
