"""The house in figures: how large modules, classes and functions are, how modules import each other, how names read.

    python tests/support/house.py

prints the table; tests/docs/test_house.py holds the limits with the same code. Complexity is McCabe's as radon counts it:
one, and one for each decision, each further operand of `and` and `or`, each comprehension and each condition in one;
what functions inside a function decide is theirs.
"""

from __future__ import annotations

import ast
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {
    "kvcal": ROOT,
    "kvcal_artifacts": ROOT / "artifacts",
    "kvcal_kernels": ROOT / "kernels",
    "kvcal_vllm": ROOT / "serving",
}
VAGUE = frozenset(
    (
        "own",
        "made",
        "found",
        "held",
        "told",
        "said",
        "given",
        "seen",
        "known",
        "wanted",
        "kept",
        "beside",
        "about",
        "left",
    )
)
PREPOSITIONS = frozenset(
    (
        "about",
        "above",
        "across",
        "after",
        "against",
        "along",
        "among",
        "around",
        "as",
        "at",
        "before",
        "behind",
        "below",
        "beside",
        "between",
        "beyond",
        "by",
        "during",
        "for",
        "from",
        "in",
        "into",
        "of",
        "on",
        "over",
        "through",
        "to",
        "under",
        "until",
        "with",
        "within",
        "without",
    )
)
# Terms of the field that contain one of VAGUE: held-out data, padding and the margin of a plot on the left.
FIELD_TERMS = ("held_out", "left_padded", "margin_left")
NO_ROOMS = {"__init__.py", "__init__.pyi", "__main__.py", "__pycache__", "py.typed"}

MOST_ENTRIES = 20  # of a folder of tests
TESTED = {"kvcal": ROOT / "kvcal", "serving": ROOT / "serving" / "kvcal_vllm"} | {
    name: ROOT / name / f"kvcal_{name}" for name in ("artifacts", "kernels")
}
HELPERS = {"support", "emulator"}  # folders of tests/ in which modules without tests lie

Import = tuple[str, str, bool]  # (importing module, imported module, at module level?)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of a package by its dotted name, with its file."""
    base = SOURCE_ROOTS[package]
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def misplaced_tests(tests: Path) -> Iterator[str]:
    """What is wrong with the layout of a folder `tests`: a line each."""
    for folder in [tests, *sorted(path for path in tests.rglob("*") if path.is_dir())]:
        place = folder.relative_to(tests)
        entries = [path.name for path in sorted(folder.iterdir()) if path.name != "__pycache__"]
        if "__pycache__" in place.parts or not entries:
            continue
        if len(entries) > MOST_ENTRIES:
            yield f"{place}: {len(entries)} entries, at most {MOST_ENTRIES}"
        if "__init__.py" not in entries:
            yield f"{place}: no __init__.py"
        room = place.parts[0] if place.parts else ""
        if room in TESTED and not TESTED[room].joinpath(*place.parts[1:]).is_dir():
            yield f"{place}: no such folder in {TESTED[room].name}"
        for name in entries:
            if name.startswith("test_"):
                if not room:
                    yield f"{name}: a test that is in no folder"
            elif name.endswith(".py") and name not in ("__init__.py", "conftest.py") and room not in HELPERS:
                yield f"{place / name}: a helper outside of tests/{' and tests/'.join(sorted(HELPERS))}"


@cache
def imports(package: str) -> list[Import]:
    """What the modules of a package import, inside functions and for types alone too."""
    return [one for name, path in modules(package) for one in imports_of(name, path)]


def imports_of(name: str, path: Path) -> Iterator[Import]:
    """What a module imports, by statements and by calls of import_module and __import__ with a constant name."""
    tree = ast.parse(path.read_text("utf-8"))
    home = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, top in walk(tree, top=True):
        if isinstance(node, ast.Import):
            yield from ((name, alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = home.split(".")[: len(home.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` imports the module too
            yield from ((name, f"{source}.{alias.name}", top) for alias in node.names)
        elif (target := imported_by_call(node)) is not None and isinstance(target, ast.Constant):
            named = str(target.value)
            dots = len(named) - len(named.lstrip("."))
            base = home.split(".")[: len(home.split(".")) - dots + 1] if dots else []
            yield name, ".".join([*base, named.lstrip(".")]), top


IMPORTING = {"import_module", "__import__"}


def imported_by_call(node: ast.AST) -> ast.expr | None:
    """The first argument of a call that imports a module by its name; None for anything else."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    return node.args[0] if called in IMPORTING else None


def computed_imports(package: str) -> Iterator[str]:
    """Calls that import a module whose name `imports` cannot read, but for those that stay in the calling package."""
    for name, path in modules(package):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            target = imported_by_call(node)
            if target is None or isinstance(target, ast.Constant):
                continue
            inside = isinstance(target, ast.JoinedStr) and ast.unparse(target)[2:].startswith(".{")
            if not (inside and path.name == "__init__.py"):
                yield f"{name}: {ast.unparse(node)}"


def private_uses(module: str, tree: ast.Module) -> Iterator[str]:
    """Names that begin with "_" and that a module takes from another of its package: by import, or from the module."""
    sources: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(module.split(".")[0])):
            sources.update(alias.asname or alias.name for alias in node.names)
            yield from (f"{module}: {alias.name}" for alias in node.names if is_private(alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and is_private(node.attr):
            holder = node.value.id
            if holder in sources and holder.islower():  # a module, not a class
                yield f"{module}: {holder}.{node.attr}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def walk(node: ast.AST, top: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, top
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_for_types_only(child)
        yield from walk(child, top and not inside)


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def arrows(package: str) -> dict[str, set[str]]:
    """Which modules of the package each of its modules imports."""
    names = {name for name, _ in modules(package)}
    targets: dict[str, set[str]] = {name: set() for name in names}
    for module, target, _ in imports(package):
        exact = target if target in names else target.rpartition(".")[0]
        if exact in names and exact != module:
            targets[module].add(exact)
    return targets


def entries(package: str, depth: int) -> dict[str, set[str]]:
    """What `arrows` says of folders: modules count as the entry they lie in, so many names from the top.

    At depth 2 kvcal_artifacts.hf stands for kvcal_artifacts.hf.seam.
    """
    folders: dict[str, set[str]] = {}
    for module, targets in arrows(package).items():
        entry = ".".join(module.split(".")[:depth])
        folders.setdefault(entry, set()).update(".".join(target.split(".")[:depth]) for target in targets)
        folders[entry].discard(entry)
    return folders


def depth(package: str) -> int:
    """How many names the longest name of a module has."""
    return max(len(name.split(".")) for name, _ in modules(package))


def circles_of_folders(package: str) -> list[list[str]]:
    """Circles of what lies in one folder, at every depth; of modules, see `arrows`."""
    return [circle for names in range(2, depth(package)) for circle in circles(entries(package, names))]


def circles(targets: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others: strongly connected ones (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in sorted(targets[module]):
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            place = stack.index(module)
            group = sorted(stack[place:])
            del stack[place:]
            if len(group) > 1:
                groups.append(group)

    for module in sorted(targets):
        if module not in order:
            visit(module)
    return sorted(groups)


ROOMS = (  # of kvcal, highest first: an arrow goes down this list, never up
    "cli",
    "commands",
    "demo",
    "bench",
    "bundles",
    "pipeline",
    "search",
    "evaluate",
    "calibrate",
    "methods",
    "capture",
    "text",
    "models",
    "report",
)


def climbing() -> list[str]:
    """Imports of kvcal that go up ROOMS: a line each."""
    floors = {room: len(ROOMS) - place for place, room in enumerate(ROOMS)}  # the package itself has none: its version

    def room_of(module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    return [
        f"{module} imports {target}"
        for module, targets in arrows("kvcal").items()
        for target in targets
        if (room := room_of(module)) in floors and floors.get(room_of(target), 0) > floors[room]
    ]


LINE = 120  # characters
LONGER = ("kvcal/report/page.py",)  # has a style sheet, whose lines are the page's own


def long_lines(package: str) -> list[str]:
    """Lines of more than LINE characters, prose too: file and number."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for _, path in modules(package)
        if not path.relative_to(ROOT).as_posix().startswith(LONGER)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > LINE
    ]


@cache
def kinds_of_codecs() -> frozenset[str]:
    """Names of the classes that are codecs: of kvcal_artifacts.codecs, that derive from Codec."""
    bases: dict[str, set[str]] = {}
    for module, path in modules("kvcal_artifacts"):
        if module.startswith("kvcal_artifacts.codecs"):
            classes = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef))
            bases |= {node.name: {ast.unparse(base) for base in node.bases} for node in classes}
    kinds, more = set[str](), {"Codec"}
    while more:
        more = {name for name, parents in bases.items() if parents & (kinds | {"Codec"})} - kinds
        kinds |= more
    return frozenset(kinds)


def kinds_asked(file: Path) -> list[str]:
    """Classes of codecs that a file imports and asks objects to be: by isinstance, TypeGuard or type(x) is."""
    tree, imported = ast.parse(file.read_text("utf-8")), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "codecs" in (node.module or "").split("."):
            imported |= {alias.asname or alias.name for alias in node.names}
    classes, asked = imported & kinds_of_codecs(), list[str]()
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                parts = [kinds]
            case ast.Subscript(value=ast.Name(id="TypeGuard"), slice=kinds):
                parts = [kinds]
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=comparators):
                parts = comparators
        every = [node for part in parts for node in ast.walk(part)]
        asked += [node.id for node in every if isinstance(node, ast.Name) and node.id in classes]
        asked += [node.attr for node in every if isinstance(node, ast.Attribute) and node.attr in kinds_of_codecs()]
    return asked


# Methods that fit one kind, and a table of kinds.
OF_ONE_CODEC = {f"kvcal.methods.{name}" for name in ("aqua_kv", "calibrated", "innerq", "squat")} | {
    "kvcal.bench.tables"
}


def kinds_of_codecs_asked(package: str) -> dict[str, list[str]]:
    """What `kinds_asked` finds in each module outside of codecs and OF_ONE_CODEC."""
    asked = {
        module: kinds_asked(file)
        for module, file in modules(package)
        if module not in OF_ONE_CODEC and not module.startswith("kvcal_artifacts.codecs")
    }
    return {module: kinds for module, kinds in asked.items() if kinds}


def revisited(journey: int) -> int:
    """How many stations of a journey of docs/architecture.md are ones that it had before; a test compares the page with
    what runs.
    """
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    text = re.search(rf"^\*\*{journey}\. .*?\n\n", page, re.M | re.S)
    files = re.findall(r"`([\w/]+\.py)`", text[0]) if text else []
    return len(files) - len(set(files)) if files else -1


def rooms(package: str) -> list[str]:
    """Files and folders at the top of a package, without those that every package has."""
    return sorted(path.name for path in (SOURCE_ROOTS[package] / package).iterdir() if path.name not in NO_ROOMS)


@dataclass(frozen=True)
class Size:
    """A module, class or function by its dotted name. parameters, complexity: of functions."""

    kind: str
    name: str
    lines: int
    parameters: int = 0
    complexity: int = 0


@cache
def sizes(package: str) -> tuple[Size, ...]:
    """Every module, class and function of a package, methods and functions inside others included."""
    return tuple(size for name, path in modules(package) for size in sizes_of(name, path.read_text("utf-8")))


def sizes_of(module: str, source: str) -> Iterator[Size]:
    yield Size("module", module, len(source.splitlines()))
    yield from _definitions(module, ast.parse(source))


def _definitions(prefix: str, node: ast.AST) -> Iterator[Size]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *Function.__args__)):
            name, lines = f"{prefix}.{child.name}", (child.end_lineno or child.lineno) - child.lineno + 1
            if isinstance(child, ast.ClassDef):
                yield Size("class", name, lines)
            else:
                yield Size("function", name, lines, _parameters(child.args), complexity(child))
            yield from _definitions(name, child)
        else:
            yield from _definitions(prefix, child)


def _parameters(arguments: ast.arguments) -> int:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def complexity(function: Function) -> int:
    return 1 + sum(_decisions(statement) for statement in function.body)


def _decisions(node: ast.AST) -> int:
    """Of a node and all below it, but not of functions and classes defined there."""
    if isinstance(node, (ast.ClassDef, *Function.__args__)):
        return 0
    return _decision(node) + sum(_decisions(child) for child in ast.iter_child_nodes(node))


def _decision(node: ast.AST) -> int:
    match node:
        case ast.If() | ast.IfExp() | ast.Assert():
            return 1
        case ast.For() | ast.While() | ast.AsyncFor():
            return 1 + bool(node.orelse)
        case ast.Try() | ast.TryStar():
            return len(node.handlers) + bool(node.orelse)
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.Match():
            return len(node.cases) - any(isinstance(case.pattern, ast.MatchAs) and case.guard is None
                                         and case.pattern.pattern is None for case in node.cases)  # fmt: skip
    return 0


@dataclass(frozen=True)
class Words:
    """Counts of a package. bound: names as `names_bound` has them; vague: those that `is_vague`.

    any_: the word `Any` in the text, imports and prose included; any_names: its uses as a name in code. skipped:
    `# fmt: skip`. unformatted: lines of files that the formatter leaves alone.
    """

    bound: int
    vague: int
    any_: int
    any_names: int
    skipped: int
    unformatted: int


@cache
def words(package: str) -> Words:
    bound: list[str] = []
    used_any = any_names = skipped = unformatted = 0
    excluded = outside_formatter()
    for _, path in modules(package):
        source = path.read_text("utf-8")
        used_any += len(re.findall(r"\bAny\b", source))
        skipped += source.count("# fmt: skip")
        unformatted += len(source.splitlines()) if path in excluded else 0
        tree = ast.parse(source)
        bound += names_bound(tree)
        any_names += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))
    return Words(len(bound), sum(map(is_vague, bound)), used_any, any_names, skipped, unformatted)


@cache
def outside_formatter() -> frozenset[Path]:
    """Files that pyproject.toml excludes from the formatter. Raises FileNotFoundError for a name that is none."""
    patterns: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["format"][
        "exclude"
    ]
    matched = {pattern: list(ROOT.glob(pattern)) for pattern in patterns}
    if stale := [pattern for pattern, files in matched.items() if not files]:
        raise FileNotFoundError(f"pyproject.toml, [tool.ruff.format] exclude: no file is named {stale[0]}")
    return frozenset(path for files in matched.values() for path in files)


def has_kernels(path: Path) -> bool:
    """Whether a module defines functions of Triton, which its compiler reads."""
    functions = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, Function.__args__))
    return any("triton.jit" in ast.unparse(decorator) for one in functions for decorator in one.decorator_list)


@cache
def wording(package: str) -> tuple[dict[str, list[str]], list[str]]:
    """What `vague_names` and `docstrings_in_need` give, from one look at each module."""
    by_module: dict[str, list[str]] = {}
    docstrings: list[str] = []
    for module, path in modules(package):
        tree = ast.parse(path.read_text("utf-8"))
        bound = [module.rpartition(".")[2], *names_bound(tree)]
        if vague := [name for name in bound if is_vague(name)]:
            by_module[module] = vague
        docstrings += unreadable_docstrings(module, tree)
    return by_module, docstrings


def vague_names(package: str) -> dict[str, list[str]]:
    """Names with a word of VAGUE that each module binds; modules that bind none are omitted.

    A name is that of a local, parameter, constant, attribute, function, class or of the module itself; a compound is
    vague by any of its words, but for those of FIELD_TERMS.
    """
    return wording(package)[0]


def docstrings_in_need(package: str) -> list[str]:
    """Names of what has a docstring that cannot be read alone."""
    return wording(package)[1]


def names_bound(tree: ast.AST) -> Iterator[str]:
    """Every name that is assigned, imported as, defined or a parameter."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def is_vague(name: str) -> bool:
    spelled = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if VAGUE.isdisjoint(spelled.split("_")):
        return False
    for term in FIELD_TERMS:
        spelled = re.sub(rf"(?<![a-z0-9]){term}(?![a-z0-9])", "", spelled)
    return not VAGUE.isdisjoint(spelled.split("_"))


def unreadable_docstrings(module: str, tree: ast.Module) -> Iterator[str]:
    """Names whose docstring cannot be read alone: it begins with a preposition, or with what a parameter or field is."""
    for name, node in documented(module, tree):
        text = ast.get_docstring(node) or ""
        names = re.match(r"([\w*]+(?:, [\w*]+)*)( \([^)]*\))?:", text)
        words = re.match(r"\w+", text)
        starts_with_preposition = words is not None and words[0].lower() in PREPOSITIONS
        if starts_with_preposition or (names and parameters_of(node).issuperset(names[1].split(", "))):
            yield name


def documented(prefix: str, node: ast.AST) -> Iterator[tuple[str, Documented]]:
    """A module, and every class and function in it, by dotted names."""
    if isinstance(node, Documented.__args__):
        yield prefix, node
    for child in ast.iter_child_nodes(node):
        inner = isinstance(child, (ast.ClassDef, *Function.__args__))
        yield from documented(f"{prefix}.{child.name}" if inner else prefix, child)


def parameters_of(node: Documented) -> set[str]:
    """Parameters of a function, fields of a class and parameters of its `__init__`; "None" is one of them, too."""
    names = {"None"}
    for part in [node, *(part for part in node.body if getattr(part, "name", "") == "__init__")]:
        if isinstance(part, Function.__args__):
            names |= {one.arg for one in ast.walk(part.args) if isinstance(one, ast.arg)}
    return names | {part.target.id for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}  # fmt: skip


def spread(values: list[int]) -> str:
    """Median, ninth decile and largest."""
    return f"{statistics.median_low(values)} / {ninth_decile(values)} / {max(values)}"


def ninth_decile(values: list[int]) -> int:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def lines_of_modules(package: str) -> list[int]:
    return [size.lines for size in sizes(package) if size.kind == "module"]


def table() -> list[list[str]]:
    """A row a figure, a column a package; the last two rows have one for all."""
    packages = list(SOURCE_ROOTS)

    def of(kind: str, figure: Callable[[Size], int]) -> list[str]:
        return [spread([figure(size) for size in sizes(package) if size.kind == kind]) for package in packages]

    def count(figure: Callable[[str], object]) -> list[str]:
        return [str(figure(package)) for package in packages]

    return [
        ["median / p90 / max", *packages],
        ["lines of a module", *of("module", lambda size: size.lines)],
        ["lines of a class", *of("class", lambda size: size.lines)],
        ["lines of a function", *of("function", lambda size: size.lines)],
        ["parameters of a function", *of("function", lambda size: size.parameters)],
        ["complexity of a function", *of("function", lambda size: size.complexity)],
        ["circles of modules", *count(lambda package: len(circles(arrows(package))))],
        ["circles of folders", *count(lambda package: len(circles_of_folders(package)))],
        ["entries at the top", *count(lambda package: len(rooms(package)))],
        ["vague names", *count(lambda package: words(package).vague)],
        ["vague names per 1000", *count(lambda package: round(1000 * words(package).vague / words(package).bound, 1))],
        ["Any in the text", *count(lambda package: words(package).any_)],
        ["Any as a name", *count(lambda package: words(package).any_names)],
        ["docstrings not readable alone", *count(lambda package: len(docstrings_in_need(package)))],
        ["# fmt: skip", *count(lambda package: words(package).skipped)],
        ["lines outside the formatter", *count(lambda package: words(package).unformatted)],
        ["lines of over 120 characters", *count(lambda package: len(long_lines(package)))],
        ["questions for a codec's class", *count(lambda package: len(kinds_of_codecs_asked(package)))],
        ["arrows that climb", *count(lambda package: len(climbing()) if package == "kvcal" else "-")],
        ["tests that lie elsewhere", str(len(list(misplaced_tests(ROOT / "tests"))))],
        ["journeys 1, 5: visited twice", ", ".join(str(revisited(journey)) for journey in (1, 5))],
    ]


if __name__ == "__main__":
    for row in table():
        print(f"{row[0]:30}", *(f"{cell:>18}" for cell in row[1:]))
