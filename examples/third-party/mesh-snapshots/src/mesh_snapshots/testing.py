"""The conformance suite that an author of a writer subclasses."""

from pathlib import Path

import pytest

from mesh_core import wait
from mesh_core.testing import PluginConformance
from mesh_snapshots._contract import WRITERS, Writer

SOON = 30.0


class WriterConformance(PluginConformance):
    """What holds for a writer: what holds for every plugin, and the promises of :class:`~mesh_snapshots.Writer`."""

    kind = WRITERS

    @pytest.fixture
    def writer(self) -> Writer:
        """A new writer."""
        assert isinstance(self.plugin, WRITERS.descriptor)
        return self.plugin.create()

    def test_what_is_written_is_in_the_file(self, writer: Writer, tmp_path: Path) -> None:
        """Any bytes, and none; and nothing else is left in the folder."""
        for number, data in enumerate((b"", b"\0\xff" * 1000, bytes(1 << 20))):
            path = tmp_path / f"file {number}"
            writer.write(str(path), data).get(timeout=SOON)
            assert path.read_bytes() == data
        assert len(list(tmp_path.iterdir())) == 3

    def test_a_file_is_replaced(self, writer: Writer, tmp_path: Path) -> None:
        """Also by a shorter one."""
        path = tmp_path / "file"
        for data in (b"long" * 1000, b"short"):
            writer.write(str(path), data).get(timeout=SOON)
        assert path.read_bytes() == b"short"

    def test_files_may_be_written_at_once(self, writer: Writer, tmp_path: Path) -> None:
        """Each future is that of its own file."""
        paths = [tmp_path / f"file {number}" for number in range(8)]
        futures = [writer.write(str(path), path.name.encode() * 1000) for path in paths]
        _, pending = wait(futures, timeout=SOON)
        assert not pending
        for path, future in zip(paths, futures, strict=True):
            future.get()
            assert path.read_bytes() == path.name.encode() * 1000

    def test_what_cannot_be_written_is_an_os_error(self, writer: Writer, tmp_path: Path) -> None:
        """Of the future: ``write`` itself raises nothing."""
        future = writer.write(str(tmp_path / "no such folder" / "file"), b"data")
        assert isinstance(future.exception(timeout=SOON), OSError)

    def test_what_is_left_of_an_earlier_write_does_no_harm(self, writer: Writer, tmp_path: Path) -> None:
        """A process was killed while it wrote, and another writes the same file."""
        path = tmp_path / "file"
        (tmp_path / "file.part").write_bytes(b"half" * 1000)
        writer.write(str(path), b"whole").get(timeout=SOON)
        assert path.read_bytes() == b"whole"
