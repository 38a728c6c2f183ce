"""Mutation run: plants one small fault after another in a module and sees whether its tests notice.

    python scripts/mutation.py                                   every fault in every module it knows
    python scripts/mutation.py --only plan batch                 in these modules
    python scripts/mutation.py --most 200 --seed 1               a random sample
    python scripts/mutation.py --by-hand                         the list in tests/proof/planted_faults.py

A fault is one changed comparison, operator, number, condition or order of arguments, or one statement left out. Each is
planted in a temporary copy of the project, in which the module's tests run until one fails. A fault that no test
notices is printed: it is either a test that is missing or a change that makes no difference. Needs the extra "test"
and a system that can fork.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutation_faults import ROOT, TESTS, Fault, faults_by_hand, faults_in

# Comparisons with transformers need torch; the state machines take longest and search anew each time.
CHOSEN = "not transformers and not AnyOrder"
MOST_MEMORY = 16 * 2**30  # bytes of address space for the tests of a fault, which may never stop allocating


def run_tests(folder: str, limits: dict[str, int]) -> None:
    """In a process of its own: run test files in the copied project, one after the other until a test fails.

    `limits` are seconds of processor time for each file. Exits with 0 only if all tests passed in time.
    """
    import pytest

    os.chdir(folder)
    sys.path.insert(0, folder)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    for test, limit in limits.items():
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + limit, resource.RLIM_INFINITY))
        status = pytest.main([*quiet, "-k", CHOSEN, "--hypothesis-seed=0", test])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            os._exit(1)
    os._exit(0)


def all_pass(folder: Path, limits: dict[str, int]) -> bool:
    """Whether the test files pass within their limits."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(str(folder), limits))
    process.start()
    process.join()
    return process.exitcode == 0


def limit_of(folder: Path, test: str) -> int:
    """How long a test file may take: three times what it takes without a fault, and 5 s."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    if not all_pass(folder, {test: 3600}):
        sys.exit(f"{test} fails without any fault")
    return 5 + int(3 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before))


def is_noticed(folder: Path, fault: Fault, limits: dict[str, int]) -> bool:
    """Plant a fault, run the tests, and take it out again. Tests that never end have noticed it too."""
    path = folder / "cupyllm" / f"{fault.module}.py"
    original = path.read_text(encoding="utf-8")
    path.write_text(fault.source, encoding="utf-8")
    try:
        return not all_pass(folder, limits)
    finally:
        path.write_text(original, encoding="utf-8")


def prepare() -> None:
    """Load what every run needs before forking, and let hypothesis stop at the first failure it finds."""
    import hypothesis
    import numpy  # noqa: F401
    import pytest  # noqa: F401

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
    parser.add_argument("--by-hand", action="store_true", help="plant the faults of tests/proof/planted_faults.py")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--at-least", type=float, default=85.0, help="exit with 1 below this score, in percent")
    options = parser.parse_args()
    prepare()
    chosen = faults_by_hand() if options.by_hand else choose(options.only, options.most, options.seed)
    noticed: dict[str, list[bool]] = {}
    limits: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        for fault in chosen:
            for test in fault.tests:
                limits[test] = limits.get(test) or limit_of(folder, test)
            result = is_noticed(folder, fault, {test: limits[test] for test in fault.tests})
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
