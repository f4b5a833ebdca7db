"""Arithmetic, for models that are bad at it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from caldera.tools.base import ShippedTool, ToolResponse
from caldera.tools.schemas import OpenAIFunctionToolSchema

MOST_CHARACTERS = 1000
MOST_BITS = 4096

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> int | float:
    """The value of an expression of numbers, `+ - * / // % **` and parentheses. ValueError with a
    text for the model where there is none."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip().replace(",", "").replace("^", "**"), mode="eval")
        return _value(tree.body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from error


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in BINARY:
            return _checked(BINARY[type(operation)], _value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in UNARY:
            number = UNARY[type(operation)](_value(operand))
            assert isinstance(number, int | float)
            return number
    raise ValueError(
        f"{ast.unparse(node)!r} cannot be calculated: there are numbers, + - * / // % ** and ()"
    )


def _checked(
    operation: Callable[[Any, Any], Any], left: int | float, right: int | float
) -> int | float:
    """A model must not keep the process busy with numbers that are too long to read anyway."""
    are_integers = isinstance(left, int) and isinstance(right, int)
    if operation is operator.pow and are_integers and int(left).bit_length() * right > MOST_BITS:
        raise ValueError(f"{left} ** {right} is too large")
    result = operation(left, right)
    if isinstance(result, complex):
        raise ValueError(f"{left} ** {right} is not a real number")
    if isinstance(result, int) and result.bit_length() > MOST_BITS:
        raise ValueError("the result is too large")
    assert isinstance(result, int | float)
    return result


class CalculatorTool(ShippedTool):
    """Evaluates an expression."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.of_text(
            "calculator",
            "Evaluates an arithmetic expression.",
            "expression",
            "Such as (3 + 4) * 5.",
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        result = calculate(parameters["expression"])
        shown = str(result) if isinstance(result, int) else format(result, ".12g")
        return ToolResponse(shown), None, {}
