"""The calculator tool that the embedded model is taught to call."""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from typing import Any

# OpenAI's function schema, as `tokenizer.apply_chat_template(tools=[...])` takes it.
CALCULATOR_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

_MAX_EXPRESSION_CHARACTERS = 64
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def tool_call_text(arguments: dict[str, Any], name: str = "calculator") -> str:
    """Format a tool call like the chat template."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def evaluate(expression: str) -> int | float:
    """Evaluate an expression of numbers, ``+ - * /`` and brackets.

    Powers and more than 64 characters are refused, so that no input takes long.

    Raises:
        ValueError: the text is anything else, or divides by zero.
    """
    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters; "
            f"at most {_MAX_EXPRESSION_CHARACTERS} are allowed."
        )
    try:
        value = _evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"cannot evaluate {expression!r}: {error}.") from error
    if not math.isfinite(value):
        raise ValueError(f"{expression!r} is not a finite number.")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _evaluate_node(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(
            value, bool
        ):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate_node(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate_node(left), _evaluate_node(right))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic; use + - * / and ().")
