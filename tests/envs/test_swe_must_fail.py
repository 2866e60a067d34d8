"""Copies of tests that must fail: which tests they break, and how."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import pytest

from envs.swe.must_fail import must_fail_copy
from envs.swe.runners import must_fail_name

COPIES = {
    "def test_a():\n    '''Says.'''\n    assert f(1) == 2\n": ("test_a", "Says."),
    "class A:\n    class B:\n        async def test_a(self):\n            self.assertEqual(2, f())\n": (
        "A::B::test_a",
    ),
    "if x:\n    def test_a(): return f()\n": ("test_a",),
    "def test_a(): 'é'; assert f('é') == 'é'  # é\n": ("test_a", "é"),
    "def test_a():\n    'Nothing else.'\n": (),
    "def check_a():\n    @d\n    def g(): pass\n    g()\ndef other(): pass": ("check_a",),
    "def test_a(:": (),
}


@pytest.mark.parametrize("source", COPIES)
def test_copies_that_must_fail(source: str) -> None:
    copy = must_fail_copy(source, [*COPIES[source], "check_a"])
    assert copy.names == set(COPIES[source])
    if copy.names:
        compile(copy.text, "t.py", "exec")


def test_only_tests_that_the_fix_is_for_keep_their_bodies() -> None:
    source = "def test_a():\n    assert x == 1\n\n\ndef test_b():\n    assert x == 1\n"
    copy = must_fail_copy(source, ["test_b"], ["test_a"]).text
    first, second = copy.split("def other_")[0].split("def test_b")
    assert first.count("assert x == 1") == 1 and "assert x == 1\n" not in second
    literal = re.search(r"assert x == (\d+)\n", second)
    assert literal is not None and literal[1] != "1"


LITERALS = ["1", "-2", "1.5", "'a'", "b'a'", "True", "[1, 2]", "(1,)", "{1}", "{1: 2}", "None"]


@pytest.mark.parametrize("literal", LITERALS)
def test_a_literal_becomes_another_literal(literal: str) -> None:
    """So that what reads the test's frame, constants or source reads the other one, and passes where all must fail."""
    copy = must_fail_copy(f"def test_a():\n    assert f() == {literal}\n", ["test_a"]).text
    (test,) = [node for node in ast.parse(copy).body if getattr(node, "name", "") == "test_a"]
    assert isinstance(test, ast.FunctionDef) and isinstance(test.body[0], ast.Assert)
    compared = test.body[0].test
    assert isinstance(compared, ast.Compare)
    before, after = ast.literal_eval(literal), ast.literal_eval(compared.comparators[0])
    assert after != before and (type(after) is type(before) or before is None)


def test_a_changed_value_is_another_of_its_type() -> None:
    for value in (
        True,
        0,
        -1.5,
        3 + 1j,
        "a",
        b"a",
        [1],
        (1,),
        {1},
        frozenset(),
        {"a": 1},
        None,
        float("inf"),
        object(),
    ):
        copy = must_fail_copy("def test_a():\n    assert wanted == wanted\n", ["test_a"])
        namespace = {"wanted": value}
        exec(copy.text, namespace)

        changed = namespace[next(name for name in namespace if name.startswith("other_"))](value)  # type: ignore[operator]
        assert changed != value and (
            type(changed) is type(value) or value in (None, float("inf"), b"a") or type(value) is object
        )


@pytest.mark.parametrize("wanted", [np.nan, np.array([np.nan]), np.array([]), np.array([1.0, 2.0])], ids=repr)
def test_what_numpy_calls_equal_fails_in_the_copy(wanted: Any) -> None:
    """NaN equals NaN for its assertions, and an empty array an empty one."""
    copy = must_fail_copy("def test_a():\n    assert wanted == wanted\n", ["test_a"])
    namespace = {"wanted": wanted}
    exec(copy.text, namespace)

    changed = namespace[next(name for name in namespace if name.startswith("other_"))](wanted)
    with pytest.raises((AssertionError, TypeError)):
        np.testing.assert_allclose(wanted, changed)


def test_names_of_tests_that_must_fail() -> None:
    assert (
        must_fail_name("a/b.py::C::test_a[x::y]")
        == must_fail_name("test_a (a.b.C)")
        == must_fail_name("test_a (a.b.C.test_a)")
        == "C::test_a"
    )
    assert must_fail_name("test_a") == "test_a" and must_fail_name("What it says (a.b)") == "What it says (a.b)"
