"""Tiny repositories laid out as Django and SymPy are, whose tests need the runners that those have."""

from __future__ import annotations

_DJANGO_TEXT = '''"""Text."""


def capfirst(text):
    return text[:1].upper() + text[1:]


def shorten(text, length):
    return text if len(text) <= length else text[: length - 1] + "…"
'''
_DJANGO_TESTS = '''from unittest import TestCase as PlainTestCase

from django.test import SimpleTestCase, TestCase, TransactionTestCase
from django.text import capfirst, shorten


class CapTests(SimpleTestCase):
    def test_capfirst(self):
        self.assertEqual(capfirst("hello"), "Hello")

    def test_documented(self):
        """
        Only the first letter is changed.
        More is said here.
        """
        self.assertEqual(capfirst("hELLO"), "HELLO")

    def test_empty(self):
        self.assertEqual(capfirst(""), "")


class ShortenTests(TestCase):
    def test_short(self):
        self.assertEqual(shorten("abc", 3), "abc")

    def test_parts(self):
        for length in (4, 5):
            with self.subTest(length=length):
                self.assertEqual(len(shorten("abcdefg", length)), length)


class PlainTests(PlainTestCase):
    def test_plain(self):
        """Shared by two tests"""
        self.assertTrue(capfirst("x") == "X")


class LastTests(TransactionTestCase):
    available_apps = []

    def test_last(self):
        """Shared by two tests"""
        self.assertEqual(shorten("", 3), "")
'''
DJANGO = {
    "django/__init__.py": "",
    "django/text.py": _DJANGO_TEXT,
    "django/test/__init__.py": """import unittest


class SimpleTestCase(unittest.TestCase):
    def __call__(self, result=None):
        super().__call__(result)


class TransactionTestCase(SimpleTestCase):
    available_apps = None


class TestCase(TransactionTestCase):
    pass
""",
    "django/test/runner.py": """import unittest


class DiscoverRunner:
    test_runner = unittest.TextTestRunner

    def __init__(self, verbosity):
        self.verbosity = verbosity

    def run_tests(self, labels):
        suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromName(label) for label in labels)
        return len(self.test_runner(verbosity=self.verbosity, failfast=False, resultclass=None).run(suite).failures)
""",
    "tests/runtests.py": """import argparse
import os
import sys

import django.text

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--verbosity", default=1, type=int)
    parser.add_argument("--settings")
    parser.add_argument("--parallel", nargs="?", default=0, type=int)
    options = parser.parse_args()
    os.environ["DJANGO_SETTINGS_MODULE"] = options.settings
    assert options.parallel == 1 and __import__(options.settings).TEXT
    from django.test.runner import DiscoverRunner

    if DiscoverRunner(options.verbosity).run_tests(options.modules):
        sys.exit(1)
""",
    "tests/test_sqlite.py": "TEXT = True\n",
    "tests/text_tests/__init__.py": "",
    "tests/text_tests/tests.py": _DJANGO_TESTS,
}
DJANGO_BUG = {"django/text.py": _DJANGO_TEXT.replace("text[1:]", "text[1:].lower()").replace("length - 1", "length")}

_SYMPY_NUMBERS = """def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


def inverse(a):
    return 1 / a
"""
SYMPY = {
    "sympy/__init__.py": "",
    "sympy/core/__init__.py": "",
    "sympy/core/numbers.py": _SYMPY_NUMBERS,
    "sympy/core/tests/__init__.py": "",
    "sympy/core/tests/test_numbers.py": """from sympy.core.numbers import gcd, inverse
from sympy.testing.pytest import XFAIL, raises, slow


def test_gcd():
    assert gcd(12, 18) == 6


def test_inverse():
    assert inverse(4) == 0.25
    raises(ZeroDivisionError, lambda: inverse(0))


def test_shared():
    assert gcd(5, 7) == 1


@XFAIL
def test_known_to_fail():
    assert gcd(1, 1) == 2


@slow
def test_slow():
    assert gcd(4, 2) == 2
""",
    "sympy/core/tests/test_more.py": """from sympy.core.numbers import gcd


def test_shared():
    assert gcd(6, 9) == 3


def test_more():
    yield check, 3


def check(number):
    assert gcd(number, 0) == number
""",
    "sympy/testing/__init__.py": "",
    "sympy/testing/pytest.py": """import functools


class XFail(Exception):
    pass


def raises(expected, code):
    try:
        code()
    except expected:
        return
    raise AssertionError("DID NOT RAISE")


def XFAIL(function):
    @functools.wraps(function)
    def wrapper():
        try:
            function()
        except Exception as error:
            raise XFail() from error

    return wrapper


def slow(function):
    function._slow = True
    return function
""",
    "sympy/testing/runtests.py": """import contextlib


@contextlib.contextmanager
def raise_on_deprecated():
    yield
""",
}
SYMPY_BUG = {"sympy/core/numbers.py": _SYMPY_NUMBERS.replace("return a\n", "return a if a < 3 else 1\n", 1)}
