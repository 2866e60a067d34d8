"""What counts as an answer, and whether it is right: pure functions, no library, microseconds.

The rule is *never accept what is wrong*; a right answer in an unusual form may be lost, and the model learns the usual
one. An answer is the content of the **last** `\\boxed{…}` with balanced braces; a number outside any box is none.

`judge` decides most cases itself and leaves symbolic ones (roots, polynomials, sets, intervals) to math-verify, after
refusing the forms in which that library accepts wrong answers:

* what that library drops unread (`\\approx 7`, `\\ldots`, primes) or does not know is compared as a string, and so are
  names of points (`ABC`). An answer may not bring in letters, in either case, that the gold does not have;
* a gold number is matched by a *literal* number only. `\\boxed{12+30}` or `\\frac{84}{2}` restate the question, and so
  does `\\binom52` in the place of 10 in a tuple or list of numbers;
* numbers are equal or not: `0.333333333333` is not 1/3, however many digits it has, also inside an expression;
* a percent sign stands in both or in neither (`50\\%` is not 50, nor 0.5);
* text in an answer must be the gold's (`5\\text{ million}`); a textual gold is compared as a string;
* equation chains (`1=\\sqrt3=\\sqrt2`) are refused; `x=` before a value is dropped;
* brackets must be the gold's: `(1,2)` is neither `[1,2]` nor `\\{1,2\\}` nor `2,1`;
* one capital letter may be a choice: `\\text{(A)}`, `(A)` and `A.` are `A`;
* numerals with a base (`11_2`) and ratios (`3:4`) are compared as strings;
* `1e10` is read as `1\\times10^{10}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 300
"""A longer answer is wrong, unparsed: parsers are superlinear and model output is hostile."""

_BOX = re.compile(r"\\boxed\s*\{")
_DECIMAL = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)(\.\d+)?|([+-]?)(\.\d+)")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)(?:[eE]|\\times10\^)\{?([+-]?\d{1,3})\}?")
_FRACTION = re.compile(r"([+-]?)(?:\\frac(?:\{(-?\d+)\}|(\d))(?:\{(\d+)\}|(\d))|(\d+)/(\d+))")
_VARIABLE = re.compile(r"([a-zA-Z](?:_\{?\w\}?)?)(?:=|\\in(?![A-Za-z]))(.+)")
_UNIT = re.compile(r"(.*?)\\(?:text|mathrm|mbox)\{([a-z ./]*)\}(?:\^\{?[23]\}?)?")
_PLAIN = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|mbox|hbox)\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-Za-z])[.)]?\)?\.?")
_TEXT = re.compile(r"\\(?:text|math[a-z]|mbox|hbox|operatorname)")
_COMMAND = re.compile(r"\\(?:begin|end)\{([a-z]+\*?)\}|\\([A-Za-z]+)")
_READ = re.compile(
    r"frac|sqrt|cdot|times|div|pm|mp|cup|cap|setminus|infty|pi|in|leq?|geq?|lt|gt|neq?|emptyset|binom|log|ln|lg|exp|"
    r"(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|max|min|[lr](?:floor|ceil|vert)|vert|[pbv]?matrix"
)
"""Commands, and environments, that math-verify reads and does not drop."""
_GREEK = re.compile(
    r"alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|zeta|eta|(?:var)?theta|Theta|iota|kappa|[lL]ambda|mu|nu|[xX]i|Pi|rho|"
    r"[sS]igma|tau|[uU]psilon|(?:var)?phi|Phi|chi|[pP]si|[oO]mega"
)
_UNREAD = re.compile(r"[^ -~]|[\'\"`?@#;:]|\.\.|[A-Z]{2}")
"""Characters that math-verify drops or does not know, and points by their names."""
_UNICODE = str.maketrans(
    {
        "−": "-",
        "°": "^\\circ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "×": "\\times ",
        "∪": "\\cup ",
    }
)
_POINT = re.compile(r"(\d*)\.(\d+)")
_MOST_PLACES = 9  # more are an approximation, which a comparison in floating point may not tell from what is meant
_BASED = re.compile(r"\d_")
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|\s+")
_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])|(?<=[A-Za-z]) (?=\d)|(?<=\d) (?=[A-Za-z])")
"""Spaces without meaning: not those between words, after a command, or between two numbers."""
_MULTIPLIERS = ("hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "score", "pair")


@dataclass(frozen=True)
class Symbolic:
    """Two normalised expressions whose equality is left to math-verify."""

    gold: str
    answer: str


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{…}`; None if there is none, or if it is not closed."""
    found = None
    for found in _BOX.finditer(text):  # noqa: B007
        pass

    if found is None:
        return None

    depth = 1
    position = found.end()
    while position < len(text):
        character = text[position]
        if character == "\\":  # \{ and \} are printed braces, not groups
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[found.end() : position].strip()
        position += 1
    return None


def normalise(answer: str) -> str:
    """The same answer without spacing, sizing and dollar signs; `\\dfrac` and others take their usual form."""
    text = answer.strip().removesuffix(".").translate(_UNICODE)
    text = _SPACING.sub(" ", text)
    text = text.replace("\\$", "").replace("$", "").replace("{,}", ",")
    text = re.sub(r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree\b", "°", text).replace("\\varnothing", "\\emptyset")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", text)
    return _SPACE.sub("", text)


def judge(gold: str, answer: str) -> bool | Symbolic:
    """Whether the boxed `answer` equals the bare `gold`; Symbolic where only symbolic mathematics can tell."""
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    gold = normalise(gold)
    answer = normalise(answer)
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if ("%" in gold) != ("%" in answer):
        return False

    variable, gold = _without_variable(gold.replace("\\%", "").replace("%", ""))
    other, answer = _without_variable(answer.replace("\\%", "").replace("%", ""))
    if variable and other and variable != other:
        return False

    gold = _without_unit(_without_degree(gold))
    answer = _without_degree(answer)
    if gold == answer:
        return True
    gold_number = literal(gold)
    if gold_number is not None:
        return _same_number(gold_number, answer)
    return _judge_symbolic(gold, answer)


def _same_number(gold: Fraction, answer: str) -> bool:
    """A literal equal to the gold; a fraction only in lowest terms, and not for a whole number."""
    value = literal(answer)
    fraction = _FRACTION.fullmatch(answer)
    if fraction is not None:
        digits = [group for group in fraction.groups()[1:] if group is not None]
        if gold.denominator == 1 or int(digits[1]) != gold.denominator:
            return False
    return value == gold


def literal(text: str) -> Fraction | None:
    """The value of a written-out number: integer, decimal, scientific or one fraction; None for anything to compute."""
    decimal = _DECIMAL.fullmatch(text)
    if decimal is not None:
        return Fraction(text.replace(",", ""))
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific is not None:
        return Fraction(scientific[1]) * Fraction(10) ** int(scientific[2])
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        above, below = (int(group) for group in fraction.groups()[1:] if group is not None)
        if below:
            return Fraction(-above if fraction[1] == "-" else above, below)
    return None


def _without_variable(text: str) -> tuple[str, str]:
    """`x=5` and `x\\in(1,3]` as (variable, value); the variable is empty where there is none to drop."""
    found = _VARIABLE.fullmatch(text)
    return (found[1], found[2]) if found is not None and "=" not in found[2] else ("", text)


def _without_degree(text: str) -> str:
    """A number of degrees as the number; of anything else the sign stays."""
    return text[:-1] if text.endswith("°") and literal(text[:-1]) is not None else text


def _without_unit(gold: str) -> str:
    """A gold number with a unit may be answered bare; an answer may not add what the gold does not have."""
    found = _UNIT.fullmatch(gold)
    if found is None or literal(found[1]) is None or any(word in found[2] for word in _MULTIPLIERS):
        return gold
    return found[1]


def _judge_symbolic(gold: str, answer: str) -> bool | Symbolic:
    choice = _choice(gold)
    if choice and choice.isupper():
        return choice == _choice(answer)
    if gold.count("°") != answer.count("°"):
        return False
    gold = gold.replace("°", "")
    answer = answer.replace("°", "")

    if _is_text(gold):
        return _plain_text(gold) == _plain_text(answer)
    if _is_text(answer) or ("\\{\\{" in gold) != ("\\{\\{" in answer) or _brackets(gold) != _brackets(answer):
        return False
    equations = gold.count("=")
    if answer.count("=") > equations or (equations > 1 and answer.count("=") < equations):
        return False

    scientific = _SCIENTIFIC.fullmatch(answer)
    if scientific is not None:
        answer = f"{scientific[1]}\\times10^{{{scientific[2]}}}"
    if not _restates_nothing(gold, answer) or _places(answer) > max(_places(gold), _MOST_PLACES):
        return False
    known = _letters(gold)
    constants = {letter for letter in "ei" if letter.upper() not in known}
    return Symbolic(_exact(gold), _exact(answer)) if _letters(answer) <= known | constants else False


def _restates_nothing(gold: str, answer: str) -> bool:
    """Where the gold is a list of written-out numbers, so is the answer; `\\pm3` is two of them."""
    numbers = [literal(element) for element in _elements(gold)]
    if len(numbers) == 1 or None in numbers:
        return True
    return all(literal(element.removeprefix("\\pm")) is not None for element in _elements(answer))


def _elements(text: str) -> list[str]:
    """The elements of a tuple, a set or a bare list; of anything else the text itself."""
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    elif _brackets(text):
        text = text[1:-1]
    return text.split(",")


def _places(text: str) -> int:
    """Most digits behind a point."""
    return max((len(found[2]) for found in _POINT.finditer(text)), default=0)


def _exact(text: str) -> str:
    """Decimals as fractions: of decimals math-verify compares a number of digits."""
    return _POINT.sub(lambda found: f"{{\\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}}}", text)


def _is_text(text: str) -> bool:
    """What math-verify may not read: words (four letters are no product), numerals with a base, and `_UNREAD`."""
    outside = _COMMAND.sub(" ", text)
    if _TEXT.search(text) or _BASED.search(text) or _UNREAD.search(outside) or re.search("[A-Za-z]{4}", outside):
        return True
    commands = (environment or command for environment, command in _COMMAND.findall(text))
    return not all(_READ.fullmatch(command) or _GREEK.fullmatch(command) for command in commands)


def _letters(text: str) -> set[str]:
    """Names of variables: single letters outside of commands, and Greek ones."""
    greek = {command for _, command in _COMMAND.findall(text) if _GREEK.fullmatch(command)}
    return greek | {character for character in _COMMAND.sub(" ", text) if character.isalpha()}


def _plain_text(text: str) -> str:
    """The text without text commands; case matters. A choice is its letter."""
    return _choice(text) or " ".join(re.sub(r"_\{(\w+)\}", r"_\1", _PLAIN.sub(r"\1", text)).split())


def _choice(text: str) -> str:
    """The letter of `A`, `(A)`, `\\textbf{(A) }`, …; the empty string for anything else."""
    bare = _PLAIN.sub(r"\1", text).strip("{} ")
    found = _CHOICE.fullmatch(re.sub(r"\s", "", bare))
    return found[1] if found is not None else ""


def _brackets(text: str) -> str:
    """What encloses a list: `()`, `(]`, …; the empty string for a set, a bare list, or no list at all."""
    if "," not in text or text.startswith("\\{"):
        return ""
    return text[0] + text[-1] if text[0] in "([" and text[-1] in ")]" else ""
