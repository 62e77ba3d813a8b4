"""Packaging of gradprune; tool settings are in pyproject.toml, development pins in requirements-dev.txt."""

from setuptools import find_packages, setup

ROOT = find_packages(include=["gradprune", "gradprune.*"], exclude=["gradprune.passes", "gradprune.passes.*"])
PASSES = ["gradprune.passes", *(f"gradprune.passes.{name}" for name in find_packages("passes"))]

setup(
    name="gradprune",
    version="0.1.0",
    description="Prove that a microbatch has no gradient, and do not compute it",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*ROOT, *PASSES],
    package_dir={"gradprune.passes": "passes"},
    package_data={"gradprune": ["py.typed"]},
    install_requires=["torch>=2.11", "sympy>=1.13", "numpy>=1.26", "typer>=0.12", "rich>=13"],
    extras_require={
        "megatron": ["megatron-core>=0.16.1"],
        "trl": ["trl>=1.16", "transformers>=4.57", "peft>=0.18"],
        "report": ["matplotlib>=3.8"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.8",
            "mypy>=1.13",
            "matplotlib>=3.8",
            "transformers>=4.57",
        ],
    },
    entry_points={
        "console_scripts": ["gradprune=gradprune.cli:main"],
        "torch_dynamo_backends": ["gradprune=gradprune.backend:compile_graph"],
    },
    classifiers=["License :: OSI Approved :: Apache Software License", "Programming Language :: Python :: 3"],
)
