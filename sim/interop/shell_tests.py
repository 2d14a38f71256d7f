"""Conditions and arithmetic of bash, as far as they can be decided from text alone."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
TEXTS: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b, ast.FloorDiv: lambda a, b: a // b, ast.Mod: operator.mod,
}  # fmt: skip
LARGEST_NUMBER = 1 << 63


def decide(words: list[str], is_unknown: Callable[[str], bool]) -> bool | None:
    """What `[ ... ]`, `[[ ... ]]` or `test ...` answers; None where the files or the environment would have to be asked."""
    inside = [word for word in words[1:] if word not in ("]", "]]", "(", ")")]
    answer: bool | None = None
    joined = ""
    for part, after in _parts(inside):
        one = _one(part, is_unknown)
        if joined == "&&":
            answer = False if answer is False or one is False else None if None in (answer, one) else True
        elif joined == "||":
            answer = True if answer is True or one is True else None if None in (answer, one) else False
        else:
            answer = one
        joined = after
    return answer


def _parts(words: list[str]) -> list[tuple[list[str], str]]:
    parts: list[tuple[list[str], str]] = []
    current: list[str] = []
    for word in words:
        if word in ("&&", "||", "-a", "-o"):
            parts.append((current, {"-a": "&&", "-o": "||"}.get(word, word)))
            current = []
        else:
            current.append(word)
    return [*parts, (current, "")]


def _one(words: list[str], is_unknown: Callable[[str], bool]) -> bool | None:
    """One comparison."""
    if words and words[0] == "!":
        answer = _one(words[1:], is_unknown)
        return None if answer is None else not answer
    if any(is_unknown(word) for word in words):
        return None
    if len(words) <= 1:
        return bool(words and words[0])
    if len(words) == 2:
        return {"-z": not words[1], "-n": bool(words[1])}.get(words[0])
    if len(words) != 3:
        return None
    left, comparison, right = words
    if comparison in TEXTS:
        return TEXTS[comparison](left, right)
    numbers = arithmetic(left), arithmetic(right)
    if comparison in NUMBERS and numbers[0] is not None and numbers[1] is not None:
        return NUMBERS[comparison](numbers[0], numbers[1])
    return None


def arithmetic(text: str) -> int | None:
    """The value of whole-number arithmetic, None for anything else."""
    try:
        return _number(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = -_number(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        number = OPERATIONS[type(node.op)](_number(node.left), _number(node.right))
    else:
        raise ValueError("not whole-number arithmetic")
    if abs(number) > LARGEST_NUMBER:
        raise ValueError("too large")
    return number
