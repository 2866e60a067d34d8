"""For tools that ask for a setup.py: everything about the package stands in pyproject.toml."""

from setuptools import setup

setup()
