"""Products and sums of a PTX text that ptxas may contract to an fma.

PTX leaves that choice to ptxas for a multiplication whose product goes into an addition or subtraction, if neither names its rounding. The
fma rounds once and the pair twice, so the machine code may differ from the PTX in the last bit.
"""

from __future__ import annotations

import re

_FLOAT = r"(?:f64|f32|f32x2|f16|f16x2|bf16|bf16x2)"
_PRODUCT = re.compile(rf"mul(?:\.ftz)?(?:\.sat)?\.{_FLOAT}")
_SUM = re.compile(rf"(?:add|sub)(?:\.ftz)?(?:\.sat)?\.{_FLOAT}")
_NEGATION = re.compile(rf"neg(?:\.ftz)?\.{_FLOAT}")
_STATEMENT = re.compile(r"(?P<opcode>[a-z][\w.]*)\s+(?P<result>%\w+)\s*,\s*(?P<operands>[^;{}]+);")
_REGISTER = re.compile(r"%\w+")


def contractible(text: str) -> tuple[str, ...]:
    """Return the additions and subtractions of a PTX text that may be contracted with a product, which may be negated in between.

    A product that reaches a sum on one of several paths is not followed: ptxas contracts none today, and the gate `float_counts` would find
    it.
    """
    products: set[str] = set()
    found = []
    for statement in _STATEMENT.finditer(text):
        opcode = statement["opcode"]
        if _PRODUCT.fullmatch(opcode):
            products.add(statement["result"])
            continue
        takes_product = not products.isdisjoint(_REGISTER.findall(statement["operands"]))
        if takes_product and _NEGATION.fullmatch(opcode):
            products.add(statement["result"])
        elif takes_product and _SUM.fullmatch(opcode):
            found.append(" ".join(statement[0].split()))
    return tuple(found)
