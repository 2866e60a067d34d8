"""Notations of a kind: decimals that repeat, amounts of money, plain TeX; and words, which are no products."""

from __future__ import annotations

import pytest

from envs.math.answers import typed
from tests.envs.test_math_pairs import accepted

EQUAL = r"""
\frac13 || 0.\overline{3} || 0.\bar{3} || 0.\overline3 || .\dot3 || 0.(3) || 0.3̅
\frac16 || 0.1\overline{6} || 0.1\bar6 || 0.1\dot{6} || 0.1\overline{66}
0.\overline{142857} || \frac17 || 0.\dot{1}4285\dot{7} || 0.1\overline{428571}
-\frac{41}{33} || -1.\overline{24} || -1.2\overline{42} || -1.\dot2\dot4
4 || 3.\overline{9} || 4.\overline{0}
33.\overline{3}\% || \frac{100}{3}\%
\frac{\pi}{3} || 0.\overline{3}\pi
(1,\frac13) || (1,0.\overline{3}) || (1,\;0.(3))
18.90 || \$18.90 || \text{\$}18.9 || \mathrm{\$}\,18.90 || 18.90\$ || $\$18.90$ || \(\$ 18.90\) || \text{\$18.90}
\$1,890 || 1890 || \$1890 || 1890\text{ dollars} || \$1{,}890.00 || 1890\text{ USD}
-\$5 || \$-5 || -5 || -\text{\$}5
\text{\$}18.90 || 18.90 || \$18.9
5\text{ euros} || €5 || 5 € || \euro 5 || 5 || \text{€}5
£7 || 7 || \pounds7 || \textsterling 7
50\text{ cents} || 50¢
\frac34 || {3 \over 4} || 3 \over 4 || {3\over4} || {3} \over {4}
-\frac34 || -{3 \over 4} || {-3 \over 4}
1\frac34 || 1{3 \over 4}
\frac{x+1}{2} || {x+1 \over 2} || x+1 \over 2 || \left({x+1 \over 2}\right)
\frac{\sqrt2}{2} || {\sqrt 2 \over 2} || \sqrt{1 \over 2} || 2^{-{1 \over 2}}
\binom{n}{2} || {n \choose 2} || n \choose 2 || {n(n-1) \over 2}
x=\frac34 || x={3 \over 4}
\sqrt[3]{2} || \root 3 \of 2 || \root{3}\of{2}
10\text{ cm} || 10{\rm cm} || 10\,{\rm cm}
73 || {\bf 73}
\text{even} || {\rm even}
no || \text{no} || No || {\rm no}
a to b || \text{a to b}
ab || a\cdot b || b\cdot a || a b
3ab || 3ba
a+bi || bi+a || a+ib
\{x|1<x<2\} || \{x\mid 1<x<2\} || \{ x \mid 1 < x < 2 \} || \left\{x \middle| 2>x>1\right\}
\{x|1<x<2\} || \{x : 1<x<2\} || \{x\vert 1<x<2\}
\{x\mid x\le-1\text{ or }x\ge2\} || \{x | x\geqslant 2\text{ or }x\leqslant -1\}
\{x\mid x\text{ is even}\} || \{x | x \text{ is even}\}
x<-1\text{ or }x>3 || x>3\text{ or }x<-1 || x \lt -1 \text{ or } 3<x || x<-1\lor x>3
x>1\text{ and }y>2 || y>2, x>1
x=1\text{ or }x=2 || 1,2 || x=2, x=1 || x=1\text{ and }x=2
[k\pi,k\pi+1](k\in \mathbb{Z}) || [k\pi, k\pi + 1] (k \in \mathbb{Z})
1:\sqrt{2} || 1 : \sqrt2
3,4,5 || 3,4,\text{ and }5 || 3, 4, and 5 || 5,\text{ and }3,4
\left(\begin{array}{cc}1 & 2 \\ 3 & 4\end{array}\right) || \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \left[\begin{array}{rr}1&2\\3&4\end{array}\right]
f^{-1}(x)=\frac{x-1}{2} || \frac{x-1}{2} || f^{-1}(x) = \frac12(x-1)
"""
DIFFERENT = r"""
\{x|1<x<2\} || \{x|1<x\} || \{x|1\le x<2\} || \{x|1>x>2\} || \{1<x<2\} || \{x\}
\{x|x>1\text{ and }x<3\} || \{x|x>1\text{ or }x<3\}
x>1\text{ and }x<3 || x>1\text{ or }x<3
x<-1\text{ or }x>3 || x<-1\text{ and }x>3 || x<-1 || x<1\text{ or }x>3
x=0\text{ or }y=0 || x=0\text{ and }y=0 || x=0
56 || 5$6 || 5\$6 || 5 $ 6
2 || x^{-1}=2 || f^{-1}(x)=f(2)
\frac{x-1}{2} || f^{-1}(x)=\frac{x+1}{2}
f^{-1}(x)=\frac{x-1}{2} || f(x)=\frac{x-1}{2}
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \left(\begin{array}{cc}1&3\\2&4\end{array}\right)
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \left(\begin{array}{c|c}1&2\\3&4\end{array}\right)
1:\sqrt{2} || 1:2
\frac13 || 0.3 || 0.33 || 0.\overline{33}4 || 0.\overline{3}5 || 1 0.\overline{3} || 0.0\overline{3}
\frac13 || 3.\overline{3} || 0.\overline{34}
0.3 || 0.\overline{3} || 0.(3)
\frac16 || 0.1(6) || 0.\overline{16}
0.1(6) || 0.6 || 0.1\cdot6 || 0.16
4 || 0.\overline{4} || 3.\overline{8}
5\text{ euros} || \$5 || £5 || 5\$ || 5\text{ dollars}
5\text{ cents} || \$5 || 5 €
\$5 || €5 || 5\text{ euros} || 5\text{ cm} || 50¢
5 || €5 || £5 || 5¢ || 5\text{ dollars}
\frac34 || {4 \over 3} || 34 || {3 \choose 4} || {6 \over 8} || 3 \over 4 \over 1
4 || {8 \over 2}
\frac{a}{b} || {b \over a} || a \over b \over c || {a \choose b}
1+\frac{x}{2} || 1+x \over 2
\sqrt[3]{2} || \root 2 \of 3
on || no || \text{no} || No
no || on || o\cdot n
is || si
xi || ix
iv || vi
saw || was
to || ot
a to b || b to a || b\cdot t\cdot o\cdot a
x is y || y is x
bca || cab || acb
pi || ip
On || No
"""


def pairs(table: str) -> list[tuple[str, str]]:
    rows = table.strip().split("\n")
    return [(gold, answer) for gold, *answers in (row.split(" || ") for row in rows) for answer in answers]


@pytest.mark.parametrize(("gold", "answer"), pairs(EQUAL))
def test_another_notation_is_accepted(gold: str, answer: str) -> None:
    assert accepted(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), pairs(DIFFERENT))
def test_another_value_unit_or_word_is_refused(gold: str, answer: str) -> None:
    assert not accepted(gold, answer)


def test_amounts_of_money_have_a_unit_and_words_are_texts() -> None:
    kinds = {
        "\\$18.90": "unit",
        "£5": "unit",
        "$5$": "number",
        "0.\\overline{3}": "number",
        "no": "text",
        "ab": "expression",
    }
    assert {gold: typed(gold).kind for gold in kinds} == kinds
