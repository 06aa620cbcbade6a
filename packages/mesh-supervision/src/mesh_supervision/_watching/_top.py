"""``mesh top``: a running job on a terminal's screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, RichLog, Static
from textual.worker import get_current_worker

from mesh_core import MeshError
from mesh_core.inspect import JobInfo, LogText, ProcStacks, Snapshot
from mesh_supervision._watching._rows import HEAD, Order, Row, news, rows, summary


class Job(Protocol):
    """The part of a running job that is needed."""

    @property
    def info(self) -> JobInfo:
        """A description of the job."""

    def snapshot(self, timeout: float = 1.0, *, pss: bool = True) -> Snapshot:
        """The tree."""

    def stacks(self, mesh: str = "", timeout: float = 2.0) -> tuple[ProcStacks, ...]:
        """The threads."""

    def logs(self) -> Iterator[LogText]:
        """What workers print."""


class Stacks(ModalScreen[None]):
    """Shows where the threads of a process are in their code."""

    BINDINGS: ClassVar = [("escape,q,enter", "dismiss", "close")]
    DEFAULT_CSS = """
    Stacks { align: center middle; }
    Stacks VerticalScroll { width: 90%; height: 90%; border: round $accent; background: $surface; padding: 0 1; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(self._text), id="stacks")
        yield Footer()


class Top(App[str]):
    """The screen. Returns the last message when it ends."""

    TITLE = "mesh top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        ("q", "quit_now", "quit"),
        ("p", "pause", "pause"),
        ("s", "sort", "sort"),
        ("slash", "filter", "find"),
        ("l", "logs", "logs"),
        ("t", "stacks", "stacks"),
    ]
    CSS = """
    #summary { height: 1; background: $panel; }
    #find { display: none; height: 3; }
    #find.shown { display: block; }
    DataTable { height: 1fr; }
    #news { height: auto; max-height: 4; color: $error; }
    #logs { display: none; height: 40%; border-top: solid $accent; }
    #logs.shown { display: block; }
    """

    def __init__(self, job: Job, interval: float = 1.0) -> None:
        super().__init__()
        self._job = job
        self._interval = interval
        self._order = Order.TREE
        self._wanted = ""
        self._is_paused = False
        self._snap: Snapshot | None = None
        self._before: Snapshot | None = None
        self._rows: list[Row] = []

    def compose(self) -> ComposeResult:
        yield Static("asking the job ...", id="summary")
        yield Input(placeholder="show only rows with this text; press Enter to return", id="find")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Static("", id="news")
        yield RichLog(id="logs", max_lines=2000)
        yield Footer()

    def on_mount(self) -> None:
        """Start querying."""
        self.query_one(DataTable).add_columns(*HEAD)
        self.query_one(DataTable).focus()
        self._look()
        self.set_interval(self._interval, self._look)

    @work(thread=True, exclusive=True, group="look")
    def _look(self) -> None:
        if self._is_paused and self._snap is not None:
            return
        worker = get_current_worker()
        try:
            snap = self._job.snapshot(pss=False)
        except MeshError as error:
            if not worker.is_cancelled:
                self.call_from_thread(self.exit, str(error))
            return
        if not worker.is_cancelled:
            self.call_from_thread(self._take, snap)

    def _take(self, snap: Snapshot) -> None:
        self._before, self._snap = self._snap, snap
        self._draw()

    def _draw(self) -> None:
        snap, table = self._snap, self.query_one(DataTable)
        if snap is None:
            return
        at = table.cursor_row
        chosen = self._rows[at].key if 0 <= at < len(self._rows) else ""
        self._rows = rows(snap, self._before, self._order, self._wanted)
        table.clear()
        for row in self._rows:
            table.add_row(*(Text(cell, "bold red" if row.is_bad else "") for cell in row.cells), key=row.key)
        places = [place for place, row in enumerate(self._rows) if row.key == chosen]
        table.move_cursor(row=places[0] if places else 0)
        script = self._job.info.script.rpartition("/")[2] or "python"
        state = [f"by {self._order.value}"] if self._order is not Order.TREE else []
        state += [f"only {self._wanted!r}"] if self._wanted else []
        state += ["paused"] if self._is_paused else []
        tail = f"  ({', '.join(state)})" if state else ""
        self.query_one("#summary", Static).update(
            Text(f"{script} [{self._job.info.pid}]: {summary(snap)}{tail}")
        )
        self.query_one("#news", Static).update(Text("\n".join(list(news(snap))[:4])))

    def action_quit_now(self) -> None:
        """Quit."""
        self.exit("")

    def action_pause(self) -> None:
        """Pause or continue."""
        self._is_paused = not self._is_paused
        self._draw()

    def action_sort(self) -> None:
        """Change to the next order."""
        self._order = self._order.next
        self._draw()

    def action_filter(self) -> None:
        """Ask for a filter."""
        find = self.query_one("#find", Input)
        find.add_class("shown")
        find.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show only rows that match."""
        self._wanted = event.value
        event.input.remove_class("shown")
        self.query_one(DataTable).focus()
        self._draw()

    def action_logs(self) -> None:
        """Show or hide what workers print."""
        log = self.query_one("#logs", RichLog)
        log.toggle_class("shown")
        if log.has_class("shown"):
            self._follow()
        else:
            self.workers.cancel_group(self, "logs")

    @work(thread=True, exclusive=True, group="logs")
    def _follow(self) -> None:
        worker, log = get_current_worker(), self.query_one("#logs", RichLog)
        try:
            for one in self._job.logs():
                if worker.is_cancelled:
                    return
                self.call_from_thread(log.write, Text(one.text.rstrip("\n"), "red" if one.is_error else ""))
        except MeshError as error:
            if not worker.is_cancelled:
                self.call_from_thread(log.write, Text(str(error), "red"))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Handle Enter on a row."""
        self.action_stacks()

    def action_stacks(self) -> None:
        """Show where the threads of the chosen row's process are in their code."""
        at = self.query_one(DataTable).cursor_row
        proc = self._rows[at].proc if 0 <= at < len(self._rows) else ""
        if proc:
            self._find_stacks(proc)

    @work(thread=True, exclusive=True, group="stacks")
    def _find_stacks(self, proc: str) -> None:
        worker = get_current_worker()
        try:
            found = [each for each in self._job.stacks(proc.partition("[")[0]) if each.proc == proc]
            text = "\n".join(map(str, found)) or f"{proc} has ended"
        except MeshError as error:
            text = str(error)
        if not worker.is_cancelled:
            self.call_from_thread(self.push_screen, Stacks(text))
