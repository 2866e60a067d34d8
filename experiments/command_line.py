"""Types of arguments that the studies' command lines have in common."""

from __future__ import annotations


def names(text: str) -> list[str]:
    """`addition,long`"""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """`0,1,2`. Raises ValueError, which argparse turns into its own message."""
    return [int(number) for number in text.split(",")]
