"""How words, sentences, paragraphs and cells are counted: a page must not pass because it is read wrongly."""

from __future__ import annotations

import ast

import pytest

from experiments.structure.prose import long_sentences, plain, read, sentences, too_long, words

LONG = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Three plain words.", 3),
        ("`fresco run math_cpu steps=3` starts it", 3),
        ("[the whole table](../a/b.md#c) says – so", 5),
        ("![a picture](a.png) of it", 2),
        ("``a ` b`` is one", 3),
        ("1 024 games, α = 1", 5),
        ("a<br>b", 1),
    ],
)
def test_words_are_what_a_reader_reads(text: str, count: int) -> None:
    assert words(plain(text)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two.", 2),
        ("It is so, e.g. Here, i.e. There, see eq. 4 and Fig. 2. Next.", 2),
        ("A figure of 0.5 and 1.2.3 is none. `x` begins one. [lower](a.md) too.", 3),
        ("Is it? Yes! (It is.) *So.* “Quoted.” End", 6),
        ("The file a.py and v1.0 of https://a.b/c.d. Then more.", 2),
        ("As (https://a.b/c.d). Then more.", 2),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, count: int) -> None:
    assert len(sentences(plain(text))) == count, sentences(plain(text))


def test_a_page_falls_into_paragraphs_and_cells() -> None:
    page = """# A heading of no account

First line
and second. <!-- not
read -->

* an item
  that goes on
* another
1. and a third

> quoted

```bash
not a word of this | is prose
```

| a | b |
|---|:--|
| `x|y` and a \\| b | [t](u) |
"""
    found = read(page)
    assert found.paragraphs == [
        "First line and second.",
        "an item that goes on",
        "another",
        "and a third",
        "quoted",
    ]
    assert found.cells == ["a", "b", "Code and a \\| b", "T"]


def test_each_limit_is_one_more_than_it_allows() -> None:
    assert not too_long(" ".join(["word"] * 30) + ".")
    assert too_long(LONG + ".") == [f"sentence of 31 words: {LONG}."]
    assert not too_long("\n\n".join([". ".join(["Word " + "word " * 8] * 9)] * 2))
    (said,) = too_long(". ".join(["Word" + " word" * 6] * 13))
    assert said.startswith("paragraph of 91 words")
    assert not too_long(f"| {'w ' * 25} |")
    (said,) = too_long(f"| {'w ' * 26} | {'w ' * 25} |")
    assert said.startswith("cell of 26 words")


def test_docstrings_of_modules_classes_functions_and_fields_are_read() -> None:
    source = f'''"""{LONG}.

    a command {LONG}
"""

class A:
    """Short. {LONG.capitalize()}
    {LONG}."""

    field = 1
    """{LONG}."""

    def f(self):
        """Fine.

        * {LONG}.
        """
        return "{LONG}."
'''
    found = [said.split(": ")[0] for said in long_sentences(ast.parse(source))]
    assert found == ["1", "7", "11", "14"]
