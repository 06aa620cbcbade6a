"""PRV-1: one module knows where private folders lie, and makes and opens them; no other code can trust a place by mistake."""

import ast
from pathlib import Path

import workspace

ROOT = Path(__file__).parent.parent
HOME = "packages/mesh-core/src/mesh_core/_common/private_folders.py"
VARIABLES = {"XDG_RUNTIME_DIR", "XDG_STATE_HOME", "MESH_JOBS"}
MAKERS = {"mkdtemp", "mkstemp", "gettempdir", "TemporaryDirectory", "NamedTemporaryFile"}
EXCEPTIONS = {
    # They make them in `temporary_folder()`.
    "packages/mesh-core/src/mesh_core/_process/host_agent.py": {"mkstemp"},
    "packages/mesh-core/src/mesh_core/_system/scratch.py": {"mkdtemp"},
    "packages/mesh-core/src/mesh_core/_blocks/sandboxes/isolation.py": {"TemporaryDirectory"},
    # It measures the folder that programs are given, and makes a file for itself.
    "packages/mesh-core/src/mesh_core/cli/checks/_kernel.py": {"gettempdir", "TemporaryDirectory"},
    # For tests of users.
    "packages/mesh-core/src/mesh_core/testing/_cluster.py": {"TemporaryDirectory"},
    "packages/mesh-launchers/src/mesh_launchers/testing/_suite.py": {"TemporaryDirectory"},
}
SOURCES = [
    path
    for package in workspace.packages()
    for path in sorted((package.path / "src").rglob("*.py"))
    if str(path.relative_to(ROOT)) != HOME
]


def used(source: str) -> set[str]:
    """Return the names of variables and functions by which a file would find or make such a place itself."""
    if not any(name in source for name in VARIABLES | MAKERS):
        return set()  # which is most files, and parsing takes long
    tree = ast.parse(source)
    texts = {
        each.value
        for each in ast.walk(tree)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
    names = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    names |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    return texts & VARIABLES | names & MAKERS


def test_other_places_are_found():
    assert used("os.environ['MESH_JOBS']; tempfile.mkdtemp(); mkstemp()") == {
        "MESH_JOBS",
        "mkdtemp",
        "mkstemp",
    }
    assert used("'''Jobs are in MESH_JOBS.'''; jobs_folder()") == set()


def test_only_one_module_knows_private_places():
    found = {str(path.relative_to(ROOT)): used(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == EXCEPTIONS
