"""The faults that mutation.py plants: changes made by rule, one after another, and those listed by hand."""

from __future__ import annotations

import ast
import copy
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCHEDULING = [
    "tests/test_scheduler.py",
    "tests/test_prefix_cache.py",
    "tests/test_page_allocator.py",
    "tests/proof/test_model_of_cache.py",
    "tests/test_forks.py",
    "tests/proof/test_faults.py",
    "tests/test_engine.py",
]
# module -> the tests that are to notice, quick ones first
TESTS = {
    "page_allocator": ["tests/test_page_allocator.py", *SCHEDULING],
    "prefix_cache": ["tests/test_prefix_cache.py", *SCHEDULING],
    "sequence": ["tests/test_sequence.py", *SCHEDULING],
    "plan": SCHEDULING,
    "scheduler": SCHEDULING,
    "batch": SCHEDULING,
    "ops/sample_reference": ["tests/ops/test_sampling_op.py", "tests/test_engine.py"],
    "text_stream": ["tests/test_text_stream.py"],
}
SWAPPED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPPED_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """A module's source with one thing changed, where, and the tests that are to notice."""

    module: str
    line: int
    change: str
    source: str
    tests: tuple[str, ...]


def faults_in(module: str) -> list[Fault]:
    """Every fault that can be planted in a module."""
    tree = ast.parse((ROOT / "cupyllm" / f"{module}.py").read_text(encoding="utf-8"))
    found = []
    for number, node in enumerate(mutable_nodes(tree)):
        for which, _ in enumerate(changes_of(node)):
            mutated = copy.deepcopy(tree)
            target = mutable_nodes(mutated)[number]
            before = first_line(target)
            changed = list(changes_of(target))[which]()
            if changed is not target:
                replace_node(mutated, target, changed)
            ast.fix_missing_locations(mutated)
            change = f"{before}  ->  {first_line(changed)}"
            tests = tuple(dict.fromkeys(TESTS[module]))
            found.append(Fault(module, getattr(node, "lineno", 0), change, ast.unparse(mutated), tests))
    return found


def faults_by_hand() -> list[Fault]:
    """The faults of tests/proof/planted_faults.py."""
    listed = runpy.run_path(str(ROOT / "tests" / "proof" / "planted_faults.py"))["FAULTS"]
    found = []
    for planted in listed:
        source = (ROOT / "cupyllm" / f"{planted.module}.py").read_text(encoding="utf-8")
        line = source[: source.index(planted.replacements[0][0])].count("\n") + 1
        for old, new in planted.replacements:
            assert source.count(old) == 1, f"{planted.module}.py has {source.count(old)} times: {old}"
            source = source.replace(old, new)
        found.append(Fault(planted.module, line, planted.name, source, planted.tests))
    return found


def mutable_nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes that run: no annotations, no docstrings and no messages of assertions."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns", "msg", "decorator_list"):
            part = getattr(node, name, None)
            for root in part if isinstance(part, list) else [part] if part is not None else []:
                skipped |= {id(inner) for inner in ast.walk(root)}
    return [node for node in ast.walk(tree) if id(node) not in skipped]


def changes_of(node: ast.AST) -> Iterator[Callable[[], ast.AST]]:
    """The changes that suit a node, each a function that makes it and returns what stands there then."""
    match node:
        case ast.Compare():
            for place, op in enumerate(node.ops):
                yield lambda place=place, op=op: set_item(node, node.ops, place, SWAPPED_COMPARISONS[type(op)]())
        case ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPPED_OPERATORS:
            yield lambda: set_field(node, "op", SWAPPED_OPERATORS[type(node.op)]())
        case ast.BoolOp():
            yield lambda: set_field(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield lambda: node.operand
        case ast.Constant(value=bool()):
            yield lambda: ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield lambda: ast.Constant(node.value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            yield lambda: set_field(node, "test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Name(id=name) if name in SWAPPED_NAMES:
            yield lambda: set_field(node, "id", SWAPPED_NAMES[name])
        case ast.Call(args=[_, _, *_]) if order_matters(node):
            yield lambda: set_field(node, "args", [node.args[1], node.args[0], *node.args[2:]])
        case ast.Break():
            yield ast.Continue
        case ast.Continue():
            yield ast.Break
    is_statement = isinstance(node, ast.Assign | ast.AugAssign | ast.Delete | ast.Return)
    if is_statement or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass


def order_matters(call: ast.Call) -> bool:
    """Whether the first two arguments of a call can be swapped, and that would make a difference."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args[:2])
    return not starred and not (isinstance(call.func, ast.Name) and call.func.id in SWAPPED_NAMES)


def set_field(node: ast.AST, name: str, value: object) -> ast.AST:
    setattr(node, name, value)
    return node


def set_item(node: ast.AST, items: list, place: int, value: object) -> ast.AST:
    items[place] = value
    return node


def replace_node(tree: ast.Module, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                value[:] = [new if item is old else item for item in value]


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:80]
