"""Agent loops: responses of several turns, with tool calls or environment turns in between."""
