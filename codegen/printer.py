"""Expressions as statements of a target language, each shared one bound to a name once."""

from __future__ import annotations

from codegen.expr import Expr


class Printer:
    """Prints expressions through a dialect; subclasses say how each op, load and cast is spelled.

    `print` returns statements and the text of each result. An expression used more than once, or
    marked by `worth_a_name`, becomes a named temporary; names start with `prefix` and count up.
    """

    prefix = "t"

    def __init__(self) -> None:
        self.count = 0

    def print(self, *results: Expr) -> tuple[list[str], list[str]]:
        """(statements, one text per result) in evaluation order."""
        uses: dict[Expr, int] = {}
        for result in results:
            for node in result.walk():
                for arg in node.args:
                    uses[arg] = uses.get(arg, 0) + 1
        for result in results:
            uses[result] = uses.get(result, 0) + 1
        statements: list[str] = []
        texts: dict[Expr, str] = {}
        for result in results:
            for node in self.order(result):
                if node in texts:
                    continue
                text = self.expression(node, [texts[a] for a in self.operands(node)])
                if self.worth_a_name(node, uses.get(node, 0)):
                    name = f"{self.prefix}{self.count}"
                    self.count += 1
                    statements.append(self.bind(name, node, text))
                    text = name
                texts[node] = text
        return statements, [texts[r] for r in results]

    def operands(self, node: Expr) -> tuple[Expr, ...]:
        """The operands printed in the same scope; a reduction prints its element itself."""
        return () if node.op == "reduce" else node.args

    def order(self, result: Expr) -> list[Expr]:
        """Nodes below `result` in the same scope, operands first."""
        found: list[Expr] = []
        seen: set[int] = set()

        def visit(node: Expr) -> None:
            if id(node) not in seen:
                seen.add(id(node))
                for arg in self.operands(node):
                    visit(arg)
                found.append(node)

        visit(result)
        return found

    def worth_a_name(self, node: Expr, uses: int) -> bool:
        """True where the text would be repeated at a cost."""
        return uses > 1 and node.op not in ("const", "var")

    def expression(self, node: Expr, args: list[str]) -> str:
        """The text of `node` over the texts of its operands."""
        return getattr(self, f"on_{node.op}", self.on_call)(node, args)

    def bind(self, name: str, node: Expr, text: str) -> str:
        """The statement that gives `text` a name."""
        raise TypeError(f"{type(self).__name__} does not say how a name is bound")

    def on_call(self, node: Expr, args: list[str]) -> str:
        """The text of arithmetic and functions."""
        raise TypeError(f"{type(self).__name__} does not print {node.op}")
