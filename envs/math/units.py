"""The units that are known: a value may be answered without one of these, and never without anything else.

A unit is a product of powers, `{"m": 1, "s": -1}`; names of one unit are one. Units are not converted into each other.
"""

from __future__ import annotations

import re

_NAMES = """
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres
m meter meters metre metres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
mg milligram milligrams
g gram grams
kg kilogram kilograms
lb lbs pound pounds
oz ounce ounces
ton tons
mL ml milliliter milliliters millilitre millilitres
L l liter liters litre litres
gal gallon gallons
qt quart quarts
pint pints
cup cups
s sec second seconds
min minute minutes
h hr hrs hour hours
day days
week weeks
month months
year years
N newton newtons
J joule joules
W watt watts
V volt volts
Hz hertz
K kelvin
Pa pascal pascals
mol mole moles
degree degrees deg °
rad radian radians
dollar dollars USD
cent cents
euro euros EUR
sterling GBP
yen JPY
rupee rupees INR
unit units
person people
student students
child children
way ways
point points
apple apples
book books
coin coins
ticket tickets
"""
_KNOWN = {name: names.split()[0] for names in _NAMES.strip().splitlines() for name in names.split()}
_KNOWN_WORDS = {name: unit for name, unit in _KNOWN.items() if len(name) > 3}
_COMMAND = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|mbox|hbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_FACTOR = re.compile(r"([A-Za-z°]+)(?:\^\{?(-?[1-9])\}?)?")

Unit = tuple[tuple[str, int], ...]


def unit(text: str) -> Unit | None:
    """The unit that LaTeX such as `\\text{ cm}^2` or `\\mathrm{m/s}` is; None if it is not known."""
    plain = _FRACTION.sub(r"\1/\2", _COMMAND.sub(r" \1 ", text))
    plain = re.sub(r"\bper\b", "/", plain).replace("\\cdot", "*").replace("{", "").replace("}", "").strip()
    plain = re.sub(r"\s*\^\s*", "^", plain)
    above, *below = re.split(r"\s*/\s*", plain)
    if not plain or len(below) > 1:
        return None

    powers: dict[str, int] = {}
    for side, sign in ((above, 1), *((each, -1) for each in below)):
        factors = _factors(side)
        if factors is None:
            return None
        for name, power in factors:
            powers[name] = powers.get(name, 0) + sign * power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _factors(text: str) -> list[tuple[str, int]] | None:
    """Of one side of a stroke: `square feet`, `kg*m^2`; None if a word is not known."""
    found: list[tuple[str, int]] = []
    power = 1
    for word in re.split(r"[\s*~]+", text.strip()):
        if word in ("square", "sq", "cubic", "cu"):
            power = 2 if word.startswith("s") else 3
            continue

        factor = _FACTOR.fullmatch(word.removesuffix("."))
        name = factor[1] if factor is not None else ""
        name = _KNOWN.get(name) or _KNOWN_WORDS.get(name.lower(), "")
        if factor is None or not name or (power > 1 and factor[2]):
            return None
        found.append((name, power * int(factor[2] or 1)))
        power = 1
    return found if found and power == 1 else None
