"""Mutation run: plants one small fault after another in a module and sees whether its tests notice.

    python scripts/mutation.py                                   every fault in every module below
    python scripts/mutation.py --only plan batch                 in these modules
    python scripts/mutation.py --most 200 --seed 1               a random sample

A fault is one changed comparison, operator, number, condition or order of arguments, or one statement left out. Each is
planted in a temporary copy of the project, in which the module's tests run until one fails. A fault that no test
notices is printed: it is either a test that is missing or a change that makes no difference. Needs the extra "test"
and a system that can fork.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
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
# Comparisons with transformers need torch; the state machines take longest and search anew each time.
CHOSEN = "not transformers and not AnyOrder"
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
EXIT_NOTICED = 1  # pytest's exit status when a test failed


@dataclass(frozen=True)
class Fault:
    """A module's source with one thing changed, and where."""

    module: str
    line: int
    change: str
    source: str


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
            found.append(Fault(module, getattr(node, "lineno", 0), change, ast.unparse(mutated)))
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


def run_tests(folder: str, tests: list[str]) -> None:
    """In a process of its own: run the tests in the copied project, and exit with pytest's status."""
    import pytest

    os.chdir(folder)
    sys.path.insert(0, folder)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = [*quiet, "-k", CHOSEN, "--hypothesis-seed=0", *tests]
    os._exit(int(pytest.main(arguments)))


def status_of_tests(folder: Path, module: str, limit: float) -> int | None:
    """pytest's exit status, or None when the tests took longer than `limit` seconds."""
    existing = [test for test in dict.fromkeys(TESTS[module]) if (folder / test).exists()]
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(str(folder), existing))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def is_noticed(folder: Path, fault: Fault, limit: float) -> bool:
    """Plant a fault, run the tests, and take it out again. Tests that never end have noticed it too."""
    path = folder / "cupyllm" / f"{fault.module}.py"
    original = path.read_text(encoding="utf-8")
    path.write_text(fault.source, encoding="utf-8")
    try:
        return status_of_tests(folder, fault.module, limit) != 0
    finally:
        path.write_text(original, encoding="utf-8")


def prepare() -> None:
    """Load what every run needs before forking, and let hypothesis stop at the first failure it finds."""
    import hypothesis
    import numpy  # noqa: F401

    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutation", phases=phases, deadline=None, database=None)
    hypothesis.settings.load_profile("mutation")
    sys.dont_write_bytecode = True


def copy_project(folder: Path) -> None:
    """Copy what git knows or would take: sources and tests, no caches."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "cupyllm", "tests", "configs", "pyproject.toml"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def choose(modules: list[str], most: int | None, seed: int) -> list[Fault]:
    faults = [fault for module in modules for fault in faults_in(module)]
    if most is None or most >= len(faults):
        return faults
    chosen = set(random.Random(seed).sample(range(len(faults)), most))
    return [fault for number, fault in enumerate(faults) if number in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults and see whether the tests notice.")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS), help="modules; default all")
    parser.add_argument("--most", type=int, help="plant at most this many faults, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--at-least", type=float, default=85.0, help="exit with 1 below this score, in percent")
    options = parser.parse_args()
    prepare()
    chosen = choose(options.only, options.most, options.seed)
    noticed: dict[str, list[bool]] = {}
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        for fault in chosen:
            if fault.module not in limits:
                start = time.monotonic()
                if status_of_tests(folder, fault.module, limit=3600) != 0:
                    print(f"the tests of {fault.module} fail without any fault")
                    return 2
                limits[fault.module] = 30 + 4 * (time.monotonic() - start)
            result = is_noticed(folder, fault, limits[fault.module])
            noticed.setdefault(fault.module, []).append(result)
            if not result:
                print(f"not noticed: cupyllm/{fault.module}.py:{fault.line}: {fault.change}", flush=True)
    for module, results in noticed.items():
        print(f"{module}: {sum(results)} of {len(results)} noticed")
    total = [result for results in noticed.values() for result in results]
    score = 100 * sum(total) / len(total)
    print(f"all: {sum(total)} of {len(total)} noticed, {score:.1f} %")
    return 0 if score >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
