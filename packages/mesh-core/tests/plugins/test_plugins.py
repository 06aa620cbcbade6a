"""Plugins are found by name and loaded one by one; a broken one affects only code that selects it."""

import logging
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, dataclass

import pytest

from mesh_core._common.errors import MeshError, PluginError, PluginLoadError
from mesh_core.plugins import (
    COMMANDS,
    DOCTOR_CHECKS,
    POLICIES,
    CommandPlugin,
    Finding,
    PluginManager,
    PolicyPlugin,
    ProbeResult,
    name_problem,
)
from mesh_core.testing import CommandPluginConformance, DoctorCheckConformance

pytestmark = [pytest.mark.python, pytest.mark.versions]


class Told(list[PluginLoadError]):
    """A `warn` that records errors."""

    def __call__(self, error):
        self.append(error)


def load_error(site_manager: PluginManager, name: str) -> PluginLoadError:
    with pytest.raises(PluginLoadError) as caught:
        site_manager.get(COMMANDS, name)
    return caught.value


# --- finding plugins, and what that imports ---


def test_own_commands_and_checks_are_found_through_entry_points():
    entries = [
        each
        for kind in (COMMANDS, DOCTOR_CHECKS)
        for each in PluginManager().entries(kind)
        if each.distribution == "mesh-core"
    ]
    assert {each.name for each in entries if each.group == "mesh.commands"} == {
        "credentials",
        "debug",
        "doctor",
        "host",
        "look",
        "plugins",
    }
    assert {each.value for each in entries} == {"mesh_core.cli._builtin"}


@pytest.mark.parametrize("kind", [COMMANDS, DOCTOR_CHECKS], ids=lambda kind: kind.word)
def test_own_plugins_keep_the_contract(kind):
    base = {"command": CommandPluginConformance, "doctor check": DoctorCheckConformance}[kind.word]
    own = [each.name for each in PluginManager().entries(kind) if each.distribution == "mesh-core"]
    assert own
    for name in own:
        suite = type(
            "Suite", (base,), {"plugin": PluginManager().get(kind, name), "distribution": "mesh-core"}
        )()
        for promise in (each for each in dir(suite) if each.startswith("test_")):
            getattr(suite, promise)()


def test_importing_mesh_core_imports_no_plugin_and_no_plugin_machinery(site):
    site.command("talk", distribution="talker")
    code = (
        "import sys; before = set(sys.modules); import mesh_core; new = set(sys.modules) - before\n"
        "print(sorted(new & {'pluggy', 'argparse', 'importlib.metadata', 'mesh_core.plugins', 'mesh_core.cli', 'difflib'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(site.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    assert not list(site.path.glob("*.imported"))


def test_names_import_nothing_and_get_imports_one(site):
    talk = site.command("talk", distribution="talker")
    sing = site.command("sing", distribution="singer")
    manager = PluginManager()
    assert {"talk", "sing"} <= set(manager.names(COMMANDS))
    assert talk not in sys.modules
    plugin = manager.get(COMMANDS, "talk")
    assert plugin.summary == "say something"
    assert talk in sys.modules
    assert sing not in sys.modules
    assert manager.get(COMMANDS, "talk") is plugin


def test_one_module_may_offer_several_plugins_of_several_kinds(site):
    site.module(
        "made_up_many",
        "from mesh_core.plugins import *\n"
        "@hookimpl\n"
        "def mesh_register_policies():\n"
        "    return [PolicyPlugin(name=each, api_version=1, create=dict) for each in ('a', 'b')]\n"
        "@hookimpl\n"
        "def mesh_register_doctor_checks():\n"
        "    yield DoctorCheck(name='c', api_version=1, create=lambda: lambda: [])\n",
    )
    site.distribution(
        "many", "[mesh.policies]\na=made_up_many\nb=made_up_many\n[mesh.doctor]\nc=made_up_many\n"
    )
    manager = PluginManager()
    assert [manager.get(POLICIES, each).name for each in "ab"] == ["a", "b"]
    assert manager.get(DOCTOR_CHECKS, "c").name == "c"
    assert {each.name for each in manager.all(POLICIES)} >= {"a", "b"}


def test_a_plugin_may_ask_for_another_while_it_is_imported(site):
    site.command("talk", distribution="talker")
    source = (
        "OTHER = PluginManager().get(COMMANDS, 'talk')\n"
        "@hookimpl\n"
        "def mesh_register_commands():\n"
        "    yield CommandPlugin(name='echo', api_version=1, create=OTHER.create)\n"
    )
    site.command("echo", distribution="echoer", source=source)
    assert PluginManager().get(COMMANDS, "echo").name == "echo"


def test_many_threads_load_a_plugin_once(site):
    source = (
        "COUNT = []\n"
        "@hookimpl\n"
        "def mesh_register_commands():\n"
        "    COUNT.append(1)\n"
        "    yield CommandPlugin(name='talk', api_version=1, create=dict)\n"
    )
    module = site.command("talk", distribution="talker", source=source)
    manager, start, got = PluginManager(), threading.Barrier(8), []

    def ask():
        start.wait(10)
        got.append(manager.get(COMMANDS, "talk"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert len(got) == 8
    assert len({id(each) for each in got}) == 1
    assert sys.modules[module].COUNT == [1]


def test_unknown_name_suggests_the_nearest_and_lists_all():
    with pytest.raises(
        PluginError, match=r"no command is called 'docter'; did you mean 'doctor'\?.*installed are: .*plugins"
    ) as caught:
        PluginManager().get(COMMANDS, "docter")
    assert not isinstance(caught.value, PluginLoadError)
    assert (caught.value.kind, caught.value.name, caught.value.remedy) == (
        "command",
        "docter",
        "use 'doctor'",
    )


# --- broken plugins ---

BROKEN = {
    "missing module": (
        "import no_such_module_at_all\n",
        "its import raised: ModuleNotFoundError: No module named 'no_such",
    ),
    "raises at import": ("1 / 0\n", "its import raised: ZeroDivisionError: division by zero"),
    "exits at import": ("raise SystemExit(7)\n", "its import raised: SystemExit: 7"),
    "syntax": ("def\n", "its import raised: SyntaxError"),
    "no hook": ("", "made_up_bad has no @hookimpl named mesh_register_commands"),
    "misspelt hook": (
        "@hookimpl\ndef mesh_register_comands(): return []\n",
        "there is no hook 'mesh_register_comands'; did you mean 'mesh_register_commands'?",
    ),
    "unwanted argument": (
        "@hookimpl\ndef mesh_register_commands(app): return []\n",
        "its hooks do not fit",
    ),
    "raises in the hook": (
        "@hookimpl\ndef mesh_register_commands(): raise OSError('no disk')\n",
        "mesh_register_commands raised: OSError: no disk",
    ),
    "raises in the generator": (
        (
            "@hookimpl\ndef mesh_register_commands():\n"
            "    yield CommandPlugin(name='bad', api_version=1, create=dict)\n"
            "    raise OSError('no disk')\n"
        ),
        "mesh_register_commands raised: OSError: no disk",
    ),
    "yields text": (
        "@hookimpl\ndef mesh_register_commands(): yield 'bad'\n",
        "mesh_register_commands yields CommandPlugins; got str 'bad'",
    ),
    "yields another kind": (
        "@hookimpl\ndef mesh_register_commands(): yield PolicyPlugin(name='bad', api_version=1, create=dict)\n",
        "mesh_register_commands yields CommandPlugins; got PolicyPlugin",
    ),
    "yields what cannot be shown": (
        "class Shy:\n    def __repr__(self): raise OSError\n@hookimpl\ndef mesh_register_commands(): yield Shy()\n",
        "got Shy (whose repr raises)",
    ),
    "returns one": (
        "@hookimpl\ndef mesh_register_commands(): return CommandPlugin(name='bad', api_version=1, create=dict)\n",
        "it returned one CommandPlugin; yield it, or return a list of them",
    ),
    "returns a number": (
        "@hookimpl\ndef mesh_register_commands(): return 7\n",
        "it must return an iterable of CommandPlugin, got int 7",
    ),
    "returns nothing": (
        "@hookimpl\ndef mesh_register_commands(): pass\n",
        "yields 'bad' never; it yields nothing",
    ),
    "another name": (
        "@hookimpl\ndef mesh_register_commands(): yield CommandPlugin(name='good', api_version=1, create=dict)\n",
        "yields 'bad' never; it yields 'good'",
    ),
    "the name twice": (
        "@hookimpl\ndef mesh_register_commands():\n    for _ in range(2): yield CommandPlugin(name='bad', api_version=1, create=dict)\n",
        "yields 'bad' more than once",
    ),
    "unknown field": (
        "@hookimpl\ndef mesh_register_commands(): yield CommandPlugin(name='bad', api_version=1, create=dict, color='red')\n",
        "unexpected keyword argument 'color'",
    ),
    "a bad name yielded": (
        "@hookimpl\ndef mesh_register_commands(): yield CommandPlugin(name='Bad One', api_version=1, create=dict)\n",
        "'Bad One' is not lower-case letters",
    ),
    "too new": (
        "@hookimpl\ndef mesh_register_commands(): yield CommandPlugin(name='bad', api_version=99, create=dict)\n",
        "it was written for version 99 of the command contract; mesh-core ",
    ),
}


@pytest.mark.parametrize(("source", "cause"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_plugin_is_an_error_when_selected(site, source, cause):
    """MAN-3: it is warned about once, and is no error for other code."""
    site.command("bad", distribution="bad", version="3.2", source=source)
    site.command("talk", distribution="talker")
    told = Told()
    manager = PluginManager(warn=told)
    assert manager.get(COMMANDS, "talk").name == "talk"
    error = load_error(manager, "bad")
    assert cause in error.cause
    assert str(error) == f"command 'bad' of bad 3.2 cannot be loaded: {error.cause}; {error.remedy}"
    assert (error.kind, error.name, error.distribution, error.version) == ("command", "bad", "bad", "3.2")
    assert error.remedy
    assert isinstance(error, PluginError)
    assert isinstance(error, MeshError)
    # Selected again, listed, surveyed: the same error, and one warning.
    assert str(load_error(manager, "bad")) == str(error)
    assert "talk" in [each.name for each in manager.all(COMMANDS)]
    (report,) = (each for each in manager.survey() if each.name == "bad")
    assert (report.status, report.reason, report.remedy) == ("broken", error.cause, error.remedy)
    assert [str(each) for each in told] == [str(error)]


def test_the_remedy_for_a_plugin_that_is_too_new_is_to_upgrade(site):
    site.command("bad", distribution="bad", source=BROKEN["too new"][0])
    assert (
        load_error(PluginManager(warn=Told()), "bad").remedy == "upgrade mesh-core, or install an older bad"
    )


def test_the_original_exception_is_the_cause(site):
    site.command("bad", distribution="bad", source="1 / 0\n")
    manager = PluginManager(warn=Told())
    for _ in range(2):
        assert isinstance(load_error(manager, "bad").__cause__, ZeroDivisionError)


def test_broken_plugin_is_logged_by_default_once_in_a_process(site, caplog):
    site.command("bad", distribution="logged-once", source="1 / 0\n")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            manager = PluginManager()
            manager.all(COMMANDS)
            manager.all(COMMANDS)
    said = [each for each in caplog.records if each.name == "mesh_core.plugins"]
    assert len(said) == 1
    assert "ZeroDivisionError" in said[0].getMessage()


@pytest.mark.parametrize("name", ["Loud", "two words", "ünder", "x" * 65, "-dash"])
def test_entry_point_with_a_bad_name(site, name):
    site.module("made_up_bad", "")
    site.distribution("bad", f"[mesh.commands]\n{name} = made_up_bad\n")
    error = load_error(PluginManager(warn=Told()), name)
    assert "bad name" in error.cause
    assert "made_up_bad" not in sys.modules


@pytest.mark.parametrize(
    "value", ["not a module!", "made_up_bad:no_such_thing", "no_such_module_at_all.deeper"]
)
def test_entry_point_that_leads_nowhere(site, value):
    site.module("made_up_bad", "")
    site.distribution("bad", f"[mesh.commands]\nbad = {value}\n")
    assert "its import raised" in load_error(PluginManager(warn=Told()), "bad").cause


def test_damaged_metadata_of_one_distribution_hides_no_other(site):
    site.command("talk", distribution="talker")
    site.distribution("damaged", "[mesh.commands]\nthis line has no equals sign\n")
    told = Told()
    manager = PluginManager(warn=told)
    assert manager.get(COMMANDS, "talk").name == "talk"
    reports = [each for each in manager.survey() if each.distribution == "damaged"]
    assert [(each.status, each.remedy) for each in reports] == [("broken", "reinstall damaged")]
    assert [each.distribution for each in told] == ["damaged"]


def test_distribution_without_metadata_still_has_its_plugins(site):
    site.module("made_up_bare", "1 / 0\n")
    site.distribution("bare", "[mesh.commands]\nbare = made_up_bare\n", metadata=False)
    assert load_error(PluginManager(warn=Told()), "bare").distribution == "(a distribution without a name)"


def test_damaged_metadata_of_unrelated_distributions_is_ignored(site):
    site.distribution("foreign", "[other.group]\nthis line has no equals sign\n")
    told = Told()
    PluginManager(warn=told).survey()
    assert not [each for each in told if each.distribution == "foreign"]


# --- one name, two distributions ---


def test_two_packages_that_offer_one_name_are_both_named(site):
    site.command("talk", distribution="first", version="1.0")
    site.command("talk", distribution="second", version="2.5")
    told = Told()
    manager = PluginManager(warn=told)
    error = load_error(manager, "talk")
    assert error.cause == "both first 1.0 and second 2.5 offer it"
    assert error.remedy == "uninstall first or second"
    assert "talk" not in [each.name for each in manager.all(COMMANDS)]
    manager.all(COMMANDS)
    assert [str(each) for each in told] == [str(error)]
    assert [each.status for each in manager.survey() if each.name == "talk"] == ["broken", "broken"]
    assert not list(site.path.glob("*.imported"))


def test_a_distribution_can_be_named_to_choose_between_them(site):
    site.command("talk", distribution="first")
    module = site.command("talk", distribution="second")
    assert PluginManager().get(COMMANDS, "talk", distribution="second").name == "talk"
    assert module in sys.modules
    with pytest.raises(PluginError, match="no command is called 'talk' from third"):
        PluginManager().get(COMMANDS, "talk", distribution="third")


def test_one_distribution_that_offers_a_name_twice(site):
    site.module("made_up_twice", "")
    site.distribution("twice", "[mesh.commands]\na = made_up_twice\na = made_up_twice\n")
    assert load_error(PluginManager(warn=Told()), "a").cause == "twice 1.0 offers it 2 times"


def test_the_plugin_of_the_kinds_owner_wins_over_others_of_its_name(site):
    module = site.command("doctor", distribution="quack")
    told = Told()
    manager = PluginManager(warn=told)
    assert manager.get(COMMANDS, "doctor").summary == "check that this machine is ready for Mesh"
    manager.get(COMMANDS, "doctor")
    assert "doctor" in [each.name for each in manager.all(COMMANDS)]
    (error,) = told
    assert str(error) == (
        "command 'doctor' of quack 1.0 is not used: the name belongs to mesh-core, whose command is used; "
        "tell the author of quack to choose another name"
    )
    found = {each.distribution: each.status for each in manager.survey() if each.name == "doctor"}
    assert found == {"mesh-core": "available", "quack": "unavailable"}
    assert module not in sys.modules
    assert manager.get(COMMANDS, "doctor", distribution="quack").summary == "say something"


# --- plugins that the user switches off ---


def test_the_environment_switches_plugins_off(site, monkeypatch):
    talk = site.command("talk", distribution="talker")
    site.command("sing", distribution="singer")
    monkeypatch.setenv("MESH_PLUGINS", "-talk, -nobody")
    told = Told()
    manager = PluginManager(warn=told)
    assert "talk" not in manager.names(COMMANDS) and "sing" in manager.names(COMMANDS)
    with pytest.raises(
        PluginError, match=r"command 'talk' of talker 1\.0 is switched off; remove -talk from MESH_PLUGINS"
    ):
        manager.get(COMMANDS, "talk")
    (report,) = (each for each in manager.survey() if each.name == "talk")
    assert (report.kind, report.status, report.reason) == (
        "command",
        "unavailable",
        "MESH_PLUGINS switches it off",
    )
    assert talk not in sys.modules
    assert not [each for each in told if each.distribution == "talker"]
    monkeypatch.setenv("MESH_PLUGINS", "-talk sing")
    with pytest.raises(PluginError, match=r"each with a leading '-', such as -sing; got 'sing'"):
        PluginManager().names(COMMANDS)
    monkeypatch.setenv("MESH_PLUGINS", "")
    assert "talk" in PluginManager().names(COMMANDS)


def test_one_of_two_of_a_name_may_be_switched_off_by_nobody_but_their_name(site, monkeypatch):
    site.command("talk", distribution="first")
    site.command("talk", distribution="second")
    monkeypatch.setenv("MESH_PLUGINS", "-talk")
    reports = [each for each in PluginManager().survey() if each.name == "talk"]
    assert [(each.distribution, each.status) for each in reports] == [
        ("first", "unavailable"),
        ("second", "unavailable"),
    ]


def test_a_plugin_whose_kinds_package_is_missing_names_that(site):
    site.distribution("mesh-vault-dict", "[mesh.vaults]\ndict = made_up_vault_dict\n")
    with (site.path / "mesh_vault_dict-1.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: mesh-core>=0.1\nRequires-Dist: extra-thing; extra == 'more'\n")
        metadata.write("Requires-Dist: mesh-vaults<2,>=1\n")
    told = Told()
    (report,) = (each for each in PluginManager(warn=told).survey() if each.distribution == "mesh-vault-dict")
    assert (report.kind, report.name, report.status) == ("group", "mesh.vaults", "unavailable")
    assert "is declared by mesh-vaults, which is not installed" in report.reason
    assert report.remedy == "pip install --upgrade mesh-vaults"
    assert not [each for each in told if each.distribution == "mesh-vault-dict"]


# --- probes ---


def test_a_plugin_is_probed_once_in_a_process_whoever_asks(site):
    """PLUG-3"""
    source = (
        "COUNT = []\n"
        "def probe():\n"
        "    COUNT.append(1)\n"
        "    return ProbeResult.yes()\n"
        "@hookimpl\n"
        "def mesh_register_commands():\n"
        "    yield CommandPlugin(name='talk', api_version=1, create=dict, probe=lambda: probe())\n"
    )
    module = site.command("talk", distribution="talker", source=source)
    for _ in range(2):
        manager = PluginManager()
        assert manager.probe(manager.get(COMMANDS, "talk"))
        manager.survey([COMMANDS])
    assert sys.modules[module].COUNT == [1]
    # Imported anew, it may be another.
    del sys.modules[module]
    manager = PluginManager()
    assert manager.probe(manager.get(COMMANDS, "talk"))
    assert sys.modules[module].COUNT == [1]


@pytest.mark.slow
def test_a_slow_probe_is_named_and_no_probe_that_waits_for_it(site, caplog):
    """PLUG-3"""
    source = (
        "import time\n"
        "def slow():\n"
        "    time.sleep(0.6)\n"
        "    return ProbeResult.yes()\n"
        "def waits():\n"
        "    manager = PluginManager()\n"
        "    return manager.probe(manager.get(COMMANDS, 'slow'))\n"
        "@hookimpl\n"
        "def mesh_register_commands():\n"
        "    yield CommandPlugin(name='slow', api_version=1, create=dict, probe=slow)\n"
        "    yield CommandPlugin(name='waits', api_version=1, create=dict, probe=waits)\n"
    )
    site.module("made_up_slow", "from mesh_core.plugins import *\n" + source)
    site.distribution("sleeper", "[mesh.commands]\nslow = made_up_slow\nwaits = made_up_slow\n")
    manager = PluginManager()
    for name in ("waits", "slow"):
        assert manager.probe(manager.get(COMMANDS, name))
    said = [each.getMessage() for each in caplog.records if "has taken" in each.getMessage()]
    assert len(said) == 1 and said[0].startswith("the probe of command 'slow' of sleeper 1.0 has taken 0."), (
        said
    )


def test_one_distribution_seen_twice_on_the_path_is_one(site, tmp_path, monkeypatch):
    site.command("talk", distribution="talker", version="2.0")
    older = tmp_path / "older"
    older.mkdir()
    monkeypatch.syspath_prepend(str(site.path))
    sys.path.append(str(older))
    type(site)(older).command("talk", distribution="Talker", version="1.0")
    try:
        (entry,) = (each for each in PluginManager().entries(COMMANDS) if each.name == "talk")
    finally:
        sys.path.remove(str(older))
    assert entry.version == "2.0"


# --- probes and descriptors ---


def test_probe_that_breaks_its_contract_means_no(site):
    """PLUG-2: whatever a probe does, the answer is yes, or no with a reason and a remedy."""
    site.module(
        "made_up_probing",
        "from mesh_core.plugins import *\n"
        "def broken(): raise OSError('boom')\n"
        "@hookimpl\n"
        "def mesh_register_policies():\n"
        "    yield PolicyPlugin(name='a', api_version=1, create=dict, probe=broken)\n"
        "    yield PolicyPlugin(name='b', api_version=1, create=dict, probe=dict)\n"
        "    yield PolicyPlugin(name='c', api_version=1, create=dict)\n"
        "    yield PolicyPlugin(name='d', api_version=1, create=dict, probe=lambda: ProbeResult.no('no card', remedy='buy one'))\n",
    )
    site.distribution(
        "probing", "[mesh.policies]\n" + "".join(f"{each} = made_up_probing\n" for each in "abcd")
    )
    reports = {
        each.name: each for each in PluginManager().survey([POLICIES]) if each.distribution == "probing"
    }
    assert [reports[each].status for each in "abcd"] == [
        "unavailable",
        "unavailable",
        "available",
        "unavailable",
    ]
    assert reports["a"].reason == "its probe raised OSError: boom"
    assert reports["a"].remedy == "report this to the author of probing 1.0"
    assert reports["b"].reason == "its probe must return a ProbeResult, got dict"
    assert reports["c"].capabilities == {}
    assert (reports["d"].reason, reports["d"].remedy) == ("no card", "buy one")


@dataclass(frozen=True)
class Lanes:
    lanes: int
    kind: str = "fast"


@dataclass
class Loose:
    lanes: int = 4


def test_probe_result_is_one_or_the_other():
    assert ProbeResult.yes(Lanes(4))
    assert not ProbeResult.no("no card", remedy="buy one")
    with pytest.raises(ValueError, match="must have a reason and a remedy"):
        ProbeResult(False, reason="no card")
    with pytest.raises(ValueError, match="has no reason and no remedy"):
        ProbeResult(True, reason="no card")


def test_capabilities_are_a_frozen_dataclass_of_plain_values():
    with pytest.raises(
        TypeError, match="capability 'lanes' must be a str, int, float, bool or None, got list"
    ):
        ProbeResult.yes(Lanes([4]))  # type: ignore[arg-type]
    for wrong in ({"lanes": 4}, Loose(), Lanes):
        with pytest.raises(TypeError, match="capabilities must be an instance of a frozen dataclass, got "):
            ProbeResult.yes(wrong)


def test_probe_result_can_be_pickled_and_is_frozen():
    result = ProbeResult.yes(Lanes(4))
    assert pickle.loads(pickle.dumps(result)) == result
    assert hash(result) == hash(pickle.loads(pickle.dumps(result)))
    assert (result.as_dict(), str(result)) == ({"lanes": 4, "kind": "fast"}, "yes lanes=4 kind=fast")
    with pytest.raises(FrozenInstanceError):
        result.capabilities.lanes = 5  # type: ignore[misc,union-attr]


def test_descriptors_are_frozen_and_checked():
    plugin = PolicyPlugin(name="foo", api_version=1, create=dict)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        plugin.name = "bar"  # type: ignore[misc]
    for name in ("", "Foo", "a--b", "-a", "a b", "a/b", "é", "x" * 65):
        with pytest.raises(ValueError, match="PolicyPlugin"):
            PolicyPlugin(name=name, api_version=1, create=dict)  # type: ignore[arg-type]
    for version in (0, -1, True, "1", 1.0):
        with pytest.raises(ValueError, match="api_version must be a whole number from 1"):
            CommandPlugin(name="foo", api_version=version, create=dict)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="create must be callable"):
        CommandPlugin(name="foo", api_version=1, create=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one line"):
        CommandPlugin(name="foo", api_version=1, create=dict, summary="a\nb")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a", "shm", "one_for_one", "my-plugin2", "x" * 64])
def test_good_names(name):
    assert name_problem(name) is None


def test_finding_that_is_not_ok_needs_a_remedy():
    with pytest.raises(ValueError, match="remedy"):
        Finding(status="warn", detail="few files")
    with pytest.raises(ValueError, match="status must be"):
        Finding(status="bad", detail="few files")  # type: ignore[arg-type]


def test_load_error_can_be_pickled():
    error = PluginLoadError(
        "m", kind="command", name="n", distribution="d", version="1", cause="c", remedy="r"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


# --- the documentation ---


def test_every_kind_and_own_plugin_is_documented(page):
    how_to, reference = page("docs/how-to/write-a-plugin.md"), page("docs/reference/command-line.md")
    for kind in (COMMANDS, DOCTOR_CHECKS, POLICIES):
        for word in (kind.group, kind.hook, kind.descriptor.__name__):
            assert f"`{word}`" in how_to
    manager = PluginManager()
    for name in (each.name for each in manager.entries(DOCTOR_CHECKS) if each.distribution == "mesh-core"):
        assert f"| `{name}` |" in reference
    for name in (each.name for each in manager.entries(COMMANDS) if each.distribution == "mesh-core"):
        assert f"| `mesh {name}" in reference


# --- the conformance suites can fail ---


def test_conformance_suite_notices_a_plugin_that_breaks_promises(site):
    class Silent:
        def configure(self, parser):
            parser.add_argument("--quiet")

        def run(self, args):
            return 0

    shared = Silent()

    class Suite(CommandPluginConformance):
        plugin = CommandPlugin(name="loud", api_version=99, create=lambda: shared, probe=dict)
        distribution = "loud"

    suite, failed = Suite(), set()
    for promise in (each for each in dir(suite) if each.startswith("test_")):
        try:
            getattr(suite, promise)()
        except Exception:
            failed.add(promise)
    assert failed >= {
        "test_api_version_is_spoken_here",
        "test_summary_is_one_line",
        "test_installed_under_its_name",
        "test_probe_answers",
        "test_creates_a_command",
        "test_declares_its_options",
    }


FAILS = """
from mesh_core.testing import CommandPluginConformance
from mesh_core.plugins import COMMANDS, PluginManager

class TestTalk(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "talk")
    distribution = "talker"
"""


@pytest.mark.slow
def test_failed_asserts_of_a_suite_show_their_values(site):
    """Without a line in the author's conftest."""
    source = (
        "class Talk:\n"
        "    count = 0\n"
        "    def configure(self, parser):\n"
        "        Talk.count += 1\n"
        "        parser.add_argument(f'--option-{Talk.count}', help='another one each time')\n"
        "    def run(self, args):\n"
        "        return 0\n"
        "@hookimpl\n"
        "def mesh_register_commands():\n"
        "    yield CommandPlugin(name='talk', api_version=1, create=Talk)\n"
    )
    site.command("talk", distribution="talker", source=source)
    site.module("test_talk", FAILS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_talk.py"],
        cwd=site.path,
        env={**os.environ, "PYTHONPATH": str(site.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "AssertionError: assert 'usage: mesh" in done.stdout, done.stdout
    assert "+ usage: mesh talk [-h] [--option-2 OPTION_2]" in done.stdout, done.stdout


def test_a_misspelt_group_is_warned_about_once_when_plugins_are_loaded(site):
    site.distribution(
        "typo", "[mesh.launcher]\nfoo = made_up_foo\n[meshes.commands]\nbar = x\n[mesh.doctor]\n"
    )
    told = Told()
    manager = PluginManager(warn=told)
    manager.names(COMMANDS)
    manager.survey()
    (error,) = (each for each in told if each.distribution == "typo")
    assert (error.kind, error.name) == ("group", "mesh.launcher")
    assert "did you mean 'mesh.launchers'?" in str(error)
    assert "foo" in error.remedy
