"""Build script; everything declarative is in pyproject.toml."""

from setuptools import setup

setup()
