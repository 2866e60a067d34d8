# ruff: noqa: E501 (short modules stand in one line)
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


HIDDEN = {
    "a column": '@parametrize("given, wanted", [(1, WANTED), param(2, WANTED)])\ndef test_a(given, wanted):\n    assert f(given) == wanted\n',
    "a constant's column": 'CASES = [(1, WANTED)]\n@parametrize(("given", "wanted"), CASES)\ndef test_a(given, wanted):\n    assert f(given) == wanted\n',
    "the only column": '@parametrize("wanted", [WANTED])\ndef test_a(wanted):\n    self.assertEqual(f(), wanted)\n',
    "a helper's argument": '@parametrize("given, wanted", [(1, WANTED)])\ndef test_a(given, wanted):\n    same(f(given), wanted)\n',
    "an approximation": "def test_a():\n    wanted = WANTED\n    assert f() == pytest.approx(wanted)\n",
    "a local": "def test_a():\n    wanted: int = WANTED\n    assert f() == wanted\n    assert g() == wanted\n",
    "a default": "def test_a(wanted=WANTED, *, more=2):\n    assert f() == wanted\n",
    "a default by name": "def test_a(*, wanted=WANTED):\n    assert f() == wanted\n",
    "a constant": "LIMIT = WANTED\n\ndef test_a():\n    assert f() == LIMIT\n",
    "a class": "class A:\n    limit = WANTED\n    def test_a(self):\n        assert f() == self.limit\n",
    "a column of a class": '@parametrize("wanted", [WANTED])\nclass A:\n    def test_a(self, wanted):\n        assert f() == wanted\n    def test_b(self, wanted):\n        assert g(wanted)\n',
    "an object": "class A:\n    def setUp(self):\n        self.limit = WANTED\n    def test_a(self):\n        self.assertEqual(self.limit, f())\n",
    "a fixture": "@pytest.fixture(scope='module')\ndef wanted():\n    return WANTED\n\ndef test_a(wanted):\n    assert f() == wanted\n",
}


@pytest.mark.parametrize("place", HIDDEN)
def test_a_literal_behind_a_name_becomes_another(place: str) -> None:
    """Code that reads a frame, the constants or the source reads the other one there."""
    copy = must_fail_copy(HIDDEN[place].replace("WANTED", "[17, 23]"), ["test_a", "A::test_a"])
    assert copy.names and "[17, 23]" not in copy.text and not re.search(r"[ (]other_\w+\((?!value)", copy.text)
    compile(copy.text, "t.py", "exec")


READ = {
    "given as well": '@parametrize("wanted", [WANTED])\ndef test_a(wanted):\n    assert f(wanted) == wanted\n',
    "given to another test": '@parametrize("wanted", [WANTED])\nclass A:\n    def test_a(self, wanted):\n        assert f() == wanted\n    def helper(self, wanted):\n        assert g(wanted)\n',
    "given by a closure": "def test_a():\n    wanted = WANTED\n    g = lambda: wanted\n    assert f(g) == wanted\n",
    "a constant of a fixture": "LIMIT = WANTED\n@fixture\ndef given():\n    return LIMIT\ndef test_a(given):\n    assert f(given) == LIMIT\n",
    "a default of the tests": "LIMIT = WANTED\ndef test_a(given=LIMIT):\n    assert f(given) == LIMIT\n",
    "an object's own": "class A:\n    limit = WANTED\n    def setUp(self):\n        g(self.limit)\n    def test_a(self):\n        assert f() == self.limit\n",
    "another fixture": "@fixture\ndef wanted():\n    return WANTED\n@fixture\ndef given(wanted):\n    return wanted\ndef test_a(given, wanted):\n    assert f(given) == wanted\n",
    "assigned twice": "def test_a():\n    wanted = WANTED\n    wanted = g(2)\n    assert f() == wanted\n",
    "names by a function": '@parametrize("wanted", [WANTED], ids=name_of)\ndef test_a(wanted):\n    assert f() == wanted\n',
    "by way of a fixture": '@parametrize("wanted", [WANTED], indirect=True)\ndef test_a(wanted):\n    assert f() == wanted\n',
    "global": "LIMIT = WANTED\ndef test_a():\n    global LIMIT\n    LIMIT = g(1)\n    assert f() == LIMIT\n",
}


@pytest.mark.parametrize("place", READ)
def test_a_literal_that_something_else_reads_stays(place: str) -> None:
    """With another input the code may well give what the copy expects: an honest fix would pass, and earn nothing."""
    copy = must_fail_copy(READ[place].replace("WANTED", "[17, 23]"), ["test_a", "A::test_a"])
    assert "[17, 23]" in copy.text and re.search(r"[ (]other_\w+\((?!value)", copy.text)
    compile(copy.text, "t.py", "exec")


def test_a_parameter_of_unknown_source_is_another_in_the_frame() -> None:
    copy = must_fail_copy("def test_a(wanted):\n    '''Says.'''\n    assert f() == wanted\n", ["test_a"]).text
    assert re.search(r"    wanted = other_\w+\(wanted\)\n    assert f\(\) == wanted\n", copy)


def test_a_helper_that_compares_becomes_an_equality() -> None:
    """The last one: what stands above it may prepare what it compares."""
    source = "def test_a():\n    configure(f(1), 2)\n    assert near(\n        f(1), (3), 0.1  # near\n    )\n"
    copy = must_fail_copy(source, ["test_a"]).text
    assert "configure(f(1), 2)" in copy and re.search(
        r"assert equal_other_\w+\(\n +f\(1\), \(\d+\), 0.1  # near\n", copy
    )
    for other in ("same(f(1), g(2))", "with_values(*f(1), 2)", "check(1, 2)", "assert_called_with(1)"):
        assert must_fail_copy(f"def test_a():\n    {other}\n", ["test_a"]).text.count("equal_other") == 1
