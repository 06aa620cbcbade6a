"""Every check of the project, one session each; `./dev test` runs some of them, `nox -s NAME` one.

A quick run tests each package once, on the oldest Python, without the tests marked `full`. In a full run what another
interpreter, the lowest versions or other packages may change runs there again: the tests marked `python`, `versions` and
`beside`. `./dev test --all` leaves nothing out.

What to build, test and pin comes from the packages' own metadata (`tools/workspace.py`). Wheels are built once per
run, by the first session that asks, and every other session installs those same files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent
# nox loads this file by its path, without its folder on sys.path.
sys.path.insert(0, str(ROOT / "tools"))

import whole_run  # noqa: E402
import workspace  # noqa: E402
from bytecode import Bytecode  # noqa: E402
from dev_environment import PROFILE  # noqa: E402
from lanes import FIRST, LONG, NARROW, WORKERS, Shape, cores  # noqa: E402
from whole_run import Level  # noqa: E402
from workspace import Package  # noqa: E402

# The tests start thousands of interpreters, half of whose time goes into compiling what another one has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
# A machine with fewer Pythons than the packages support checks those it has; it does not fetch others.
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False

PACKAGES = workspace.packages()
PLUGINS = workspace.third_party()
PYTHONS = PACKAGES[0].pythons
NEWEST = next((each for each in reversed(PYTHONS) if shutil.which(f"python{each}")), PYTHONS[-1])
LEVEL = Level(os.environ.get(whole_run.LEVEL) or Level.FULL)
EVERYTHING = LEVEL is Level.ALL
QUICK = LEVEL is Level.QUICK
# Many tests wait for processes, not for a processor; those of a file stay together, as they share its fixtures.
PROCESSES = os.environ.get(WORKERS) or str(Shape.of(cores()).workers)
SIDE_BY_SIDE = ["-n", PROCESSES, "--dist", "loadfile"]
FEW_FILES = 6
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
CONSTRAINTS = ROOT / "constraints.txt"
# Older releases of PyTorch: the oldest that the global view is proven with, and others with which it can be tried. Each takes gigabytes to download.
RELEASES = [name for name in GROUPS["dependency-groups"] if name.startswith("torch-")]
# A folder that no other run shares, so that an installer's cache cannot mistake an older build for this one.
# MESH_WHEELS names a folder of finished wheels instead: several machines can then check one build.
WHEELS = Path(os.environ.get("MESH_WHEELS") or ROOT / ".nox" / "wheels" / f"{time.time_ns()}-{os.getpid()}")
# What a session has compiled of other packages, the next one need not compile.
BYTECODE = Bytecode(ROOT / ".nox" / "bytecode")
# What computes with PyTorch is tried where that is installed.
WITH_TORCH = [each for each in PACKAGES if each.name == "mesh-tensor"]
# Its tests that a release of PyTorch may change.
GLOBAL_VIEW = ["private_names", "global_view", "global_modules", "layouts", "decisions", "operator_database"]
# One in so many of them, where a run does not do everything: as many as a minute holds.
FEW_ELSEWHERE = 8
PAGES = ["docs", "README.md", *(str(package.path / "README.md") for package in PACKAGES)]
DAY = 24 * 60 * 60.0
# Where somebody collects what has failed, to run it once more at the end, failed tests do not fail their session.
PASSED = [0, 1] if os.environ.get("MESH_RUN") else [0]

OLDEST = f"tests-{PYTHONS[0]}"
nox.options.sessions = {
    Level.QUICK: [FIRST, OLDEST, "together", "lint"],
    Level.FULL: [
        FIRST, OLDEST, "integration", *({f"tests-{NEWEST}"} - {OLDEST}), "minimums", f"releases({RELEASES[0]})",
        "rust", "control_plane", "lint", "loom", "typing", "plugins", "docs", "demo",
    ],
    Level.ALL: [
        FIRST, "tests", "integration", "minimums", "releases",
        "rust", "control_plane", "lint", "loom", "typing", "plugins", "docs", "demo", "fuzz",
    ],
}[LEVEL]  # fmt: skip

by_package = nox.parametrize("package", [nox.param(package, id=package.name) for package in PACKAGES])
by_plugin = nox.parametrize("plugin", [nox.param(plugin, id=plugin.name) for plugin in PLUGINS])


@nox.session(name=FIRST)
def wheels(session: nox.Session) -> None:
    """The wheels of all packages and plugins, for the sessions that follow."""
    compile_natives(session, PACKAGES)
    for package in PACKAGES if QUICK else [*PACKAGES, *PLUGINS]:
        wheel(session, package)


@nox.session(venv_backend="none", tags=[NARROW])
def control_plane(session: nox.Session) -> None:
    """The control plane of Kubernetes, built once per version from its sources, for the tests that start it."""
    # Where there is no Go, these tests are skipped.
    session.run("python3", "tools/control_plane", success_codes=[0, 1])


@nox.session(tags=[NARROW])
def lint(session: nox.Session) -> None:
    """Style and likely mistakes (ruff); which modules import which (import-linter); circles among files of the crates."""
    install(session, groups=["lint"])
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    # It reads the sources and imports nothing, so that nothing has to be built for it.
    sources = os.pathsep.join(str(package.path / "src") for package in PACKAGES)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})
    session.run("python", "tools/rust_circles.py")


@nox.session(tags=[NARROW])
def typing(session: nox.Session) -> None:
    """Types: mypy --strict on every package, and the native module against its stub."""
    install(session, *PACKAGES, *PLUGINS, groups=["typing"])
    for package in [*PACKAGES, *PLUGINS]:
        session.run("mypy", str(package.path / "src"))
    session.run("mypy", "noxfile.py", "tools")
    for folder in ("examples", "benchmarks"):
        sources = [
            str(path.relative_to(ROOT))
            for path in sorted((ROOT / folder).iterdir())
            if path.suffix == ".py" or (path / "__init__.py").exists()
        ]
        if sources:
            session.run("mypy", *sources)
    for package in PACKAGES:
        if package.is_native:
            session.run(
                "python", "-m", "mypy.stubtest", f"{package.import_name}._native",
                "--mypy-config-file", "pyproject.toml",
                "--allowlist", str(package.path / "stubtest-allowlist.txt"),
            )  # fmt: skip


@nox.session(venv_backend="none", tags=[NARROW])
def rust(session: nox.Session) -> None:
    """The crates: tests, format, and clippy without a warning."""
    # All of the workspace, bindings too: only then have dependencies the same features as for wheels, and are compiled once.
    chosen = ["--profile", PROFILE, "--workspace", "--locked"]
    session.run("cargo", "test", "--no-run", *chosen)
    session.run("python3", "tools/cargo_test.py", *chosen, success_codes=PASSED)
    for tool, component in (("fmt", "rustfmt"), ("clippy", "clippy")):
        # Asked, not looked up: rustup puts the command on PATH whether or not the component is there.
        if subprocess.run(["cargo", tool, "--version"], capture_output=True, check=False).returncode != 0:
            session.run("rustup", "component", "add", component)
    session.run("cargo", "fmt", "--all", "--check")
    session.run("cargo", "clippy", *chosen, "--all-targets", "--", "-D", "warnings")
    if shutil.which("cargo-deny"):
        session.run("cargo", "deny", "check")
    else:
        session.log("cargo-deny is not installed: licences and sources of the crates are not checked here")


@nox.session(venv_backend="none", tags=[NARROW])
def loom(session: nox.Session) -> None:
    """Every schedule of a few threads through what they share without locks (crates/mesh-runtime/src/models)."""
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    # A folder of its own, as each flag of the compiler makes all crates anew.
    env = {"RUSTFLAGS": "--cfg loom", "CARGO_TARGET_DIR": str(target / "loom")}
    chosen = ["--profile", "schedules", "--locked", "--package", "mesh-runtime"]
    session.run("cargo", "test", *chosen, "--lib", "loom_", env=env)


@nox.session(python=PYTHONS)
@by_package
def tests(session: nox.Session, package: Package) -> None:
    """One package's tests, in an environment with what it needs and nothing else; mesh-tensor needs PyTorch.

    All on the oldest Python; on the others those that an interpreter may change.
    """
    groups = ["torch", "test"] if QUICK or package in WITH_TORCH else ["test"]
    install(session, package, groups=groups, requirements=package.test_requirements)
    if session.python == PYTHONS[0]:
        files = list(package.tests.rglob("test_*.py"))
        pytest(session, *side_by_side(files), *quickly(), str(package.tests))
    else:
        run_again(session, "python", package)


@nox.session
def together(session: nox.Session) -> None:
    """All packages together, with numpy and PyTorch: what crosses packages."""
    install_all(session, plugins=not QUICK)
    pytest(session, *SIDE_BY_SIDE, *quickly(), "--doctest-modules", "tests", "tools", "benchmarks/tests")


@nox.session(tags=[LONG])
def integration(session: nox.Session) -> None:
    """All packages together, with numpy and PyTorch: what crosses packages, and what each does beside the others."""
    install_all(session, groups=["integration", "frames"])
    # Built by now, as a rule: the session of that name begins early.
    session.run("python", "tools/control_plane", success_codes=[0, 1])
    run_again(session, "beside", *[each for each in PACKAGES if EVERYTHING or each not in WITH_TORCH])
    pytest(session, *SIDE_BY_SIDE, "--doctest-modules", "tests", "tools", "benchmarks/tests")
    pytest(session, "--doctest-modules", "--pyargs", *[each.import_name for each in WITH_TORCH])
    # Only now: some of them are plugins of pytest, and what the tests run beside need not change with them.
    session.install("-c", str(CONSTRAINTS), *nox.project.dependency_groups(GROUPS, "tools"))
    run_pages(session, "-m", "needs", *PAGES)


@nox.session(tags=[NARROW])
@by_plugin
def plugins(session: nox.Session, plugin: Package) -> None:
    """A complete outside plugin, installed as its users would, with its own tests."""
    install(session, plugin, groups=["test"], requirements=plugin.test_requirements)
    if plugin.optional_requirements:
        session.install("--no-deps", *plugin.optional_requirements)
    pytest(session, "-p", "doc_examples", str(plugin.tests), str(plugin.path / "README.md"))


@nox.session(python=PYTHONS[0])
@by_package
def minimums(session: nox.Session, package: Package) -> None:
    """What the versions of others may change in a package, with the lowest that it says it works with."""
    wheels, pins = lowest_versions(package)
    # Without the constraints: the tools must give way to the versions that are to be proven.
    requirements = [*map(str, pins.values()), *package.test_requirements]
    install(session, *wheels, groups=["test"], requirements=requirements, constraints=None, alone=True)
    run_again(session, "versions", package)


@nox.session(python=PYTHONS[0], tags=[NARROW])
@nox.parametrize("release", RELEASES, ids=RELEASES)
def releases(session: nox.Session, release: str) -> None:
    """The global view on older releases of PyTorch: some of its tests, drawn by the seed, and all of them with `--all`."""
    (package,) = WITH_TORCH
    # Without the constraints: they are about the newest PyTorch, and an older one wants other versions of what it needs.
    install(
        session,
        package,
        groups=[release, "torch", "test"],
        requirements=package.test_requirements,
        constraints=None,
    )
    files = [str(package.tests / f"test_{each}.py") for each in GLOBAL_VIEW]
    pytest(
        session,
        *files,
        env={"MESH_TENSOR_ANY_RELEASE": "1"} if EVERYTHING else {whole_run.ONE_IN: str(FEW_ELSEWHERE)},
    )


@nox.session(tags=[NARROW])
def docs(session: nox.Session) -> None:
    """The site, built strictly, and every example in it and in the docstrings, run."""
    install(session, *PACKAGES, groups=["docs"])
    # The theme's advice on what may follow it is for us, not for every build's output.
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})
    run_pages(session, "-m", "not needs", *PAGES)
    names = [package.import_name for package in PACKAGES if package not in WITH_TORCH]
    pytest(session, "--doctest-modules", "--pyargs", *names)


@nox.session(tags=[NARROW])
def demo(session: nox.Session) -> None:
    """The main job: an actor mesh trains on this machine, loses a process, and gets it back."""
    wanted = [each for each in PACKAGES if each.name in {"mesh-core", "mesh-supervision"}]
    compile_natives(session, wanted)
    install(session, *wanted, groups=["demo"])
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(default=False, venv_backend="none", tags=[NARROW])
def fuzz(session: nox.Session) -> None:
    """A minute of hostile bytes for each entry of what comes from other hosts, from the inputs in `fuzz/corpus` on."""
    # With `test --all`, what follows goes to pytest.
    session.run("python3", "tools/fuzzing.py", "run", *([] if EVERYTHING else session.posargs))


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Figures, side by side with other systems; each of those gets an environment from the script itself."""
    built = wheel(session, PACKAGES[0], profile="release")
    session.run("python", "benchmarks/run.py", "--mesh", str(built), *session.posargs)


def install_all(
    session: nox.Session, *, groups: Iterable[str] = ("integration",), plugins: bool = True
) -> None:
    """Install all packages, and the plugins, with what their tests need and PyTorch."""
    wanted = [need for package in PACKAGES for need in package.test_requirements]
    both = [*PACKAGES, *(PLUGINS if plugins else [])]
    install(session, *both, groups=groups, requirements=wanted)


def install(
    session: nox.Session,
    *wanted: Package,
    groups: Iterable[str] = (),
    requirements: Iterable[str] = (),
    constraints: Path | None = CONSTRAINTS,
    alone: bool = False,
) -> None:
    """Install this run's wheels of `wanted` and of the siblings they need, with groups of tools beside them.

    `alone` leaves the siblings out. Wheels are named by path, so that no package of the same name elsewhere is taken.
    """
    needed: dict[str, Package] = {}
    for package in wanted:
        for each in [package] if alone else workspace.closure(package, PACKAGES + PLUGINS):
            needed.setdefault(each.name, each)
    tools = nox.project.dependency_groups(GROUPS, *groups)
    files = [str(wheel(session, package)) for package in needed.values()]
    held = ["-c", str(constraints)] if constraints else []
    session.install(*held, *dict.fromkeys([*tools, *requirements]), *files)
    for folder in site_packages(session):
        BYTECODE.lend(folder)


def site_packages(session: nox.Session) -> Iterator[Path]:
    """Where the session's packages are installed."""
    return Path(session.virtualenv.location).glob("lib/python3*/site-packages")


def compile_natives(session: nox.Session, packages: Iterable[Package]) -> None:
    """Compile the native modules that these packages' wheels are made of, unless they are built, with cargo's own progress.

    All at once: one build after the other would leave processors idle.
    """
    missing = [package for package in packages if package.is_native and not built(package)]
    if missing and not EVERYTHING:
        crates = [f"--package={_crate(package)}" for package in missing]
        session.run("cargo", "build", "--locked", "--profile", PROFILE, *crates, external=True)


def built(package: Package) -> list[Path]:
    """The package's wheels that there are."""
    return sorted(WHEELS.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))


def wheel(
    session: nox.Session, package: Package, profile: str = "release" if EVERYTHING else PROFILE
) -> Path:
    """The package's wheel; built now if this run has not built it yet.

    The whole matrix tests what is released; other runs test what is quicker to compile and checks itself.
    """
    if not built(package):
        forget_old_wheels()
        # Some are built with the headers of those that they need.
        for sibling in workspace.closure(package, PACKAGES + PLUGINS):
            if sibling.name != package.name:
                wheel(session, sibling, profile)
        WHEELS.mkdir(parents=True, exist_ok=True)
        session.env["MATURIN_PEP517_ARGS"] = f"--profile {profile}"
        session.log(f"building {package.name} {package.version}")
        if session.venv_backend == "uv":
            session.run(
                "uv", "build", "--wheel", "--quiet", "--python", "python",
                "--build-constraints", str(CONSTRAINTS), "--find-links", str(WHEELS),
                "--out-dir", str(WHEELS), str(package.path),
            )  # fmt: skip
        else:
            session.run(
                "python", "-m", "pip", "wheel", "--quiet", "--no-deps",
                "--find-links", str(WHEELS), "--wheel-dir", str(WHEELS), str(package.path),
            )  # fmt: skip
    made = built(package)
    if not made:
        session.error(
            f"no wheel of {package.name} {package.version} in {WHEELS}; is the version in "
            f"{package.path}/pyproject.toml static?"
        )
    return made[-1]


def forget_old_wheels() -> None:
    """Delete what runs of other days left; one that still goes on keeps its files."""
    for folder in (ROOT / ".nox" / "wheels").glob("*-*"):
        if time.time() - folder.stat().st_mtime > DAY:
            shutil.rmtree(folder, ignore_errors=True)


def lowest_versions(package: Package) -> tuple[list[Package], dict[str, Requirement]]:
    """The siblings to take from this workspace, and a pin for everything else that `package` needs."""
    known = {each.name: each for each in PACKAGES}
    wheels, pins = [package], dict[str, Requirement]()
    for owner in workspace.closure(package, PACKAGES):
        for requirement in owner.requirements:
            pin = Requirement(workspace.lowest(requirement))
            name, floor = canonicalize_name(pin.name), pinned_version(pin)
            if name in known and Version(known[name].version) == floor:
                wheels.append(known[name])
            elif name not in pins or pinned_version(pins[name]) < floor:
                pins[name] = pin
    return list(dict.fromkeys(wheels)), pins


def pinned_version(pin: Requirement) -> Version:
    """The version in `name==version`."""
    return Version(next(iter(pin.specifier)).version)


def _crate(package: Package) -> str:
    return str(nox.project.load_toml(package.path / "rust" / "Cargo.toml")["package"]["name"])


def quickly() -> list[str]:
    """What to tell pytest to leave out of quick runs."""
    return ["-m", "not full"] if QUICK else []


def run_again(session: nox.Session, mark: str, *packages: Package) -> None:
    """Run what has the mark once more, in another environment than that which runs all of it.

    To read all tests takes longer than to run those: only the files that name the mark are read. What an interpreter or a
    dependency has changed in the way of a package's other modules shows when they are imported.
    """
    if EVERYTHING:
        pytest(session, *SIDE_BY_SIDE, *[str(package.tests) for package in packages])
        return
    session.run("python", "tools/import_all.py", *[package.import_name for package in packages])
    files = [path for package in packages for path in files_with(mark, package.tests)]
    if files:
        pytest(session, *side_by_side(files), "-m", f"{mark} and not once", *map(str, files))


def files_with(mark: str, folder: Path) -> list[Path]:
    """The test files that have a mark somewhere in them."""
    # Marks are given where the tests are, and by no conftest.py.
    found = sorted(folder.rglob("test_*.py"))
    return [path for path in found if f"mark.{mark}" in path.read_text(encoding="utf-8")]


def side_by_side(files: Sequence[Path]) -> list[str]:
    """What to tell pytest for these files: several processes take longer to start than a few files to run."""
    return SIDE_BY_SIDE if len(files) > FEW_FILES else []


def run_pages(session: nox.Session, *arguments: str) -> None:
    """Run the code blocks of Markdown pages as their readers would."""
    pytest(session, *SIDE_BY_SIDE, "-p", "doc_examples", *arguments)


def pytest(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run pytest; it may find nothing to run, and leaves a record of what failed where somebody collects them."""
    session.run(
        "pytest",
        "-p",
        "run_record",
        "-p",
        "crash_proof",
        "-p",
        "first_collects",
        *arguments,
        *session.posargs,
        env=env,
        success_codes=[*PASSED, 5],
    )
    for folder in site_packages(session):
        BYTECODE.keep(folder)
