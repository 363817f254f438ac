"""Write what Python, SymPy and NumPy print as LaTeX.

The text is parsed as an expression of Python, never run; a text with anything that is not listed
here stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

import regex

from tasks.scorers import wrappers

_PLAIN = regex.compile(r"[\w\s+\-*/^().,\[\]{}=<>!&|:]+")
_GLUED = regex.compile(r"(?<![\w.])\d[\d_.]*(?:[a-df-ik-z]|e(?![-+]?\d)|j\w)", regex.IGNORECASE)
_SCRIPT = regex.compile(r"[\^_]\s*\{")
# What Python prints and mathematicians do not write; of other text nothing needs to be rewritten.
_SIGNS = regex.compile(
    r"\*\*|\w\(|[\[{]|\d[jJ]\b|\b(?:oo|inf|[IE]|EmptySet|Reals)\b|[<>!=]=|[&|]|\*|\w\.\w"
)
_NUMPY_ROW = regex.compile(r"(?<=[\d.\]])\s+(?=[-+\d.\[])")
_QUOTED = regex.compile(r"""(\w\()(["'])([-+\w./]+)\2\)""")
_MODULES = {"np", "numpy", "math", "cmath", "sp", "sympy", "S", "fractions", "decimal", "mpmath"}

_CONSTANTS = {"pi": r"\pi", "oo": r"\infty", "inf": r"\infty", "Infinity": r"\infty", "E": "e"} | {
    **{"I": "i", "Reals": r"\mathbb{R}", "Integers": r"\mathbb{Z}", "Naturals": r"\mathbb{N}"},
    **{"EmptySet": r"\emptyset", "GoldenRatio": r"\frac{1+\sqrt{5}}{2}"},
    **{"infty": r"\infty"},
}
_GREEK = set(
    "alpha beta gamma delta epsilon theta lambda mu nu phi psi omega rho sigma tau".split()
)
_FUNCTIONS = {  # name -> LaTeX of its arguments
    **{"sqrt": r"\sqrt{{{0}}}", "cbrt": r"\sqrt[3]{{{0}}}", "root": r"\sqrt[{1}]{{{0}}}"},
    **{"exp": "e^{{{0}}}", "log10": r"\log_{{10}}({0})", "log2": r"\log_{{2}}({0})"},
    **{"abs": "|{0}|", "Abs": "|{0}|", "fabs": "|{0}|", "factorial": "({0})!"},
    **{"floor": r"\lfloor {0} \rfloor", "conjugate": r"\overline{{{0}}}"},
    **dict.fromkeys(("ceil", "ceiling"), r"\lceil {0} \rceil"),
    **dict.fromkeys(("Rational", "Fraction"), r"\frac{{{0}}}{{{1}}}"),
    **dict.fromkeys(("binomial", "comb"), r"\binom{{{0}}}{{{1}}}"),
    **{name: rf"\{name}({{0}})" for name in "sin cos tan cot sec csc sinh cosh tanh ln".split()},
    **{f"a{name}": rf"\arc{name}({{0}})" for name in "sin cos tan sinh cosh tanh".split()},
    **{"Eq": "{0}={1}", "Ne": r"{0} \ne {1}", "Unequality": r"{0} \ne {1}"},
    **{"Lt": "{0}<{1}", "Gt": "{0}>{1}", "Le": r"{0} \le {1}", "Ge": r"{0} \ge {1}"},
    **{"Complement": r"{0} \setminus {1}", "pow": "({0})^{{{1}}}", "Pow": "({0})^{{{1}}}"},
}
_JOINED = {"And": r" \text{ and } ", "Or": r" \text{ or } ", "Union": r" \cup "}
_INTERVALS = {"Interval": "[]", "open": "()", "Ropen": "[)", "Lopen": "(]"}
_THEMSELVES = set(  # called with a number, they are that number
    "float float16 float32 float64 int int8 int16 int32 int64 uint8 uint64 Integer Float mpf "
    "Decimal Fraction Rational N S nsimplify simplify Poly Symbol complex128 bool_".split()
)
_COLLECTIONS = set("list tuple array asarray FiniteSet set frozenset".split())
_MATRICES = {"Matrix", "ImmutableMatrix", "ImmutableDenseMatrix", "MutableDenseMatrix"}
_COMPARED: dict[type[ast.cmpop], str] = {
    **{ast.Eq: "=", ast.NotEq: r" \ne ", ast.Lt: "<", ast.LtE: r" \le ", ast.Gt: ">"},
    ast.GtE: r" \ge ",
}
_COLLECTED = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_LOOSE = (ast.BinOp, ast.UnaryOp, ast.Compare)


def in_latex(text: str, natural: bool = True) -> str:
    """Return printed Python as LaTeX, other text as it is; ``natural``: log(2) is a natural log."""
    if len(text) < 2:  # the option E, or a letter that means what it does in LaTeX
        return text
    source = " ".join(_QUOTED.sub(r"\1\3)", text).split())
    if not (_SIGNS.search(source) and _PLAIN.fullmatch(source) and source.isascii()):
        return text
    if wrappers.encloses(source, "[]") and "," not in source:
        source = _NUMPY_ROW.sub(", ", source)
    if _GLUED.search(source) or _SCRIPT.search(source):  # 2x, which Python would warn of; e^{-1}
        return text
    if "**" not in source:
        source = source.replace("^", "**")
    try:
        tree = ast.parse(source, mode="eval")
        if isinstance(tree.body, ast.Constant) and not isinstance(tree.body.value, complex):
            return text
        return _Writer(source, natural).write(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


class _Writer:
    """Writes the nodes of one text; raises ValueError for one that is not listed."""

    def __init__(self, source: str, natural: bool) -> None:
        self.source, self.natural = source, natural

    def write(self, node: ast.expr) -> str:
        for kind, method in _METHODS.items():
            if isinstance(node, kind):
                return method(self, node)
        raise ValueError(f"{type(node).__name__} is not printed as mathematics")

    def every(self, nodes: list[ast.expr]) -> str:
        return ",".join(map(self.write, nodes))

    def grouped(self, node: ast.expr) -> str:
        """Write a term of a product or a base, in parentheses where it needs them."""
        written = self.write(node)
        is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
        return f"({written})" if isinstance(node, _LOOSE) and not is_product else written

    # -------- atoms

    def constant(self, node: ast.Constant) -> str:
        digits = self.source[node.col_offset : node.end_col_offset].replace("_", "").lower()
        if isinstance(node.value, bool) or not isinstance(node.value, int | float | complex):
            raise ValueError("no number")
        imaginary = "i" if digits.endswith("j") else ""
        mantissa, exponent, power = digits.removesuffix("j").partition("e")
        if exponent:
            return rf"{mantissa.removesuffix('.')}\times 10^{{{int(power)}}}{imaginary}"
        return mantissa + ("0" if mantissa.endswith(".") else "") + imaginary

    def name(self, node: ast.Name) -> str:
        if node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        if node.id in _GREEK:
            return f"\\{node.id} "
        matched = regex.fullmatch(r"([a-zA-Z])_?(\d*)", node.id)
        if not matched:
            raise ValueError("an unknown name")
        return f"{matched[1]}_{{{matched[2]}}}" if matched[2] else matched[1]

    def attribute(self, node: ast.Attribute) -> str:
        return self.name(ast.Name(self.called(node)))

    # -------- operations

    def unary(self, node: ast.UnaryOp) -> str:
        if not isinstance(node.op, ast.USub | ast.UAdd):
            raise ValueError("no sign")
        loose = isinstance(node.operand, ast.BinOp) and isinstance(
            node.operand.op, ast.Add | ast.Sub
        )
        written = self.write(node.operand)
        sign = "-" if isinstance(node.op, ast.USub) else ""
        return (
            f"{sign}({written})"
            if loose or isinstance(node.operand, ast.UnaryOp)
            else sign + written
        )

    def operation(self, node: ast.BinOp) -> str:
        left, right = node.left, node.right
        if any(isinstance(side, _COLLECTED) for side in (left, right)):
            raise ValueError("no numbers")
        match node.op:
            case ast.Add():
                return f"{self.write(left)}+{self._signed(right)}"
            case ast.Sub():
                return f"{self.write(left)}-{self._term(right)}"
            case ast.Mult():
                return rf"{self._factor(left)} \cdot {self.grouped(right)}"
            case ast.Div():
                return rf"\frac{{{self.write(left)}}}{{{self.write(right)}}}"
            case ast.Pow():
                return f"{self._base(left)}^{{{self.write(right)}}}"
            case ast.BitAnd():
                if any(_is_either(side) for side in (left, right)):
                    raise ValueError("an or inside an and")
                return rf"{self.write(left)} \text{{ and }} {self.write(right)}"
            case ast.BitOr():
                return rf"{self.write(left)} \text{{ or }} {self.write(right)}"
        raise ValueError("an unknown operation")

    def _signed(self, node: ast.expr) -> str:
        written = self.write(node)
        return f"({written})" if isinstance(node, ast.UnaryOp) else written

    def _term(self, node: ast.expr) -> str:
        """Write what is subtracted."""
        is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
        return (
            f"({self.write(node)})" if is_sum or isinstance(node, ast.UnaryOp) else self.write(node)
        )

    def _factor(self, node: ast.expr) -> str:
        """Write the first factor of a product, whose sign needs no parentheses."""
        return self.write(node) if isinstance(node, ast.UnaryOp) else self.grouped(node)

    def _base(self, node: ast.expr) -> str:
        written = self.write(node)
        simple = isinstance(node, ast.Name) or regex.fullmatch(r"\d+(?:\.\d+)?", written)
        return written if simple else f"({written})"

    def comparison(self, node: ast.Compare) -> str:
        written = self._side(node.left)
        for sign, side in zip(node.ops, node.comparators, strict=True):
            if type(sign) not in _COMPARED:
                raise ValueError("an unknown comparison")
            written += _COMPARED[type(sign)] + self._side(side)
        return written

    def _side(self, node: ast.expr) -> str:
        if isinstance(node, ast.Compare):
            raise ValueError("a comparison of a comparison")
        return self.write(node)

    # -------- collections

    def pair(self, node: ast.Tuple) -> str:
        written = self.every(node.elts)
        segment = self.source[node.col_offset : node.end_col_offset]
        return f"({written})" if wrappers.encloses(segment, "()") else written

    def sequence(self, node: ast.List) -> str:
        if not node.elts:
            return r"\emptyset"
        if all(isinstance(row, ast.List) for row in node.elts):
            return self._matrix(node.elts)
        return f"[{self.every(node.elts)}]"

    def _matrix(self, rows: list[ast.expr]) -> str:
        """Write a matrix of lists; a list that is none is a row of one."""
        cells = [row.elts if isinstance(row, ast.List) else [row] for row in rows]
        if not cells or len({len(row) for row in cells}) > 1 or not cells[0]:
            raise ValueError("no matrix")
        inside = r"\\".join("&".join(map(self.write, row)) for row in cells)
        return rf"\begin{{pmatrix}}{inside}\end{{pmatrix}}"

    def braces(self, node: ast.Set) -> str:
        if any(isinstance(each, ast.Compare) for each in node.elts):
            raise ValueError("a set by a condition")
        return rf"\{{{self.every(node.elts)}\}}"

    def dictionary(self, node: ast.Dict) -> str:
        if not node.keys:
            return r"\emptyset"
        pairs = [
            f"{self.write(key)}={self.write(value)}"
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        ]
        return ",".join(pairs)

    # -------- calls

    def called(self, node: ast.expr) -> str:
        """Return the name of a function, without its module."""
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                module in _MODULES or (module, name) in _OPENINGS
            ):
                return name
        raise ValueError("an unknown function")

    def call(self, node: ast.Call) -> str:
        name, given = self.called(node.func), node.args
        if not given and name in _COLLECTIONS:
            return r"\emptyset"
        if not given:
            raise ValueError("a call without arguments")
        if name in _MATRICES and isinstance(given[0], ast.List):
            return self._matrix(given[0].elts)
        if name == "FiniteSet":
            return rf"\{{{self.every(given)}\}}"
        if name in _COLLECTIONS and isinstance(given[0], ast.List) and len(given[0].elts) == 2:
            written = self.write(given[0])
            return written.removeprefix("[").removesuffix("]")  # no interval
        if name in _COLLECTIONS or (name in _THEMSELVES and (len(given) == 1 or name == "Poly")):
            return self.write(given[0])
        if name in _JOINED:
            return _JOINED[name].join(map(self.write, given))
        if name in _INTERVALS:
            return self._interval(_INTERVALS[name], given)
        return self._function(name, [self.write(each) for each in given])

    def _interval(self, brackets: str, ends: list[ast.expr]) -> str:
        if len(ends) != 2:
            raise ValueError("no interval")
        below, above = map(self.write, ends)
        left = "(" if below == r"-\infty" else brackets[0]
        right = ")" if above == r"\infty" else brackets[1]
        return f"{left}{below},{above}{right}"

    def _function(self, name: str, arguments: list[str]) -> str:
        if name == "log":
            command = r"\ln" if self.natural else r"\log"
            if len(arguments) == 2:
                command = rf"\log_{{{arguments[1]}}}"
            return f"{command}({arguments[0]})"
        if name not in _FUNCTIONS:
            raise ValueError("an unknown function")
        template = _FUNCTIONS[name]
        if len(arguments) != 1 + ("{1}" in template):
            raise ValueError("other arguments")
        return template.format(*arguments)


def _is_either(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


_OPENINGS = {("Interval", name) for name in _INTERVALS}
_METHODS: dict[type[ast.expr], Callable[..., str]] = {
    ast.Constant: _Writer.constant,
    ast.Name: _Writer.name,
    ast.Attribute: _Writer.attribute,
    ast.UnaryOp: _Writer.unary,
    ast.BinOp: _Writer.operation,
    ast.Compare: _Writer.comparison,
    ast.Tuple: _Writer.pair,
    ast.List: _Writer.sequence,
    ast.Set: _Writer.braces,
    ast.Dict: _Writer.dictionary,
    ast.Call: _Writer.call,
}
