"""Which tests a change is taken to concern."""

import subprocess
from pathlib import Path

import pytest

from affected import affected, changed_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout."""
    files = {
        "packages/mesh-core/src/mesh_core/_blocks/queue.py": "class Queue: ...\ndef _inner(): ...\n",
        "packages/mesh-core/tests/blocks/test_queue_store.py": "",
        "packages/mesh-core/tests/blocks/test_pool.py": "",
        "packages/mesh-core/tests/meshes/test_ports.py": "",
        "packages/mesh-core/tests/conftest.py": "",
        "packages/mesh-supervision/tests/test_why.py": "from mesh_core import Queue\n",
        "tests/test_demo.py": "import demo_helper\n",
        "tests/demo_helper.py": "def helps(): ...\n",
        "crates/mesh-proto/Cargo.toml": "[dependencies]\n",
        "crates/mesh-runtime/Cargo.toml": '[dependencies]\nmesh-proto = "1"\n',
        "crates/mesh-tls/Cargo.toml": "[dependencies]\n",
        "crates/mesh-proto/src/ports.rs": "",
        "docs/concepts/queue.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            "packages/mesh-core/src/mesh_core/_blocks/queue.py",
            {"blocks/test_queue_store.py", "blocks/test_pool.py", "tests/test_why.py"},
        ),
        ("packages/mesh-core/tests/meshes/test_ports.py", {"meshes/test_ports.py"}),
        ("packages/mesh-core/tests/conftest.py", {"mesh-core/tests"}),
        ("tests/demo_helper.py", {"tests/test_demo.py"}),
        ("docs/concepts/queue.md", {"concepts/queue.md"}),
        ("crates/mesh-proto/src/ports.rs", {"meshes/test_ports.py"}),
    ],
)
def test_a_change_concerns_its_room_its_name_and_its_users(tree, changed, expected):
    chosen = affected(tree, [Path(changed)]).files
    assert {"/".join(path.parts[-2:]) for path in chosen} == expected


def test_a_crate_is_tested_with_those_that_use_it(tree):
    assert affected(tree, [Path("crates/mesh-proto/src/ports.rs")]).crates == {"mesh-proto", "mesh-runtime"}
    assert affected(tree, [Path("crates/mesh-tls/src/lib.rs")]).crates == {"mesh-tls"}


def test_changed_files_are_those_that_differ_and_those_that_are_new(tree):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tree, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    assert changed_files(tree, "HEAD") == []
    (tree / "docs/concepts/queue.md").write_text("more")
    (tree / "tests/test_demo.py").unlink()
    (tree / "tests/test_new.py").write_text("")
    assert changed_files(tree, "HEAD") == [Path("docs/concepts/queue.md"), Path("tests/test_new.py")]
