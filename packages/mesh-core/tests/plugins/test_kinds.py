"""Kinds belong to the packages that declare them; core finds them through entry points."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from mesh_core import PluginError, PluginLoadError
from mesh_core.plugins import (
    BYPASSES,
    COMMANDS,
    DOCTOR_CHECKS,
    POLICIES,
    CommandPlugin,
    Plugin,
    PluginKind,
    PluginManager,
)
from mesh_core.testing import KindConformance, PluginConformance

pytestmark = [pytest.mark.python, pytest.mark.versions]

KIND = """
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from mesh_core.plugins import *

Path(__file__).with_suffix(".imported").touch()

@dataclass(frozen=True)
class StoreCapabilities:
    durable: bool

@dataclass(frozen=True, kw_only=True)
class StorePlugin(Plugin[StoreCapabilities]):
    create: Callable[[], dict]

STORES = PluginKind(
    word="store", group="mesh.stores", hook="mesh_register_stores", descriptor=StorePlugin,
    api_version=2, capabilities=StoreCapabilities, owner="mesh-stores",
)
"""

STORE = """
from mesh_core.plugins import *
from made_up_stores import StoreCapabilities, StorePlugin

def probe(): return {answer}

@hookimpl
def mesh_register_stores():
    yield StorePlugin(name="disk", api_version=2, create=dict, summary="a disk", {more})
"""
GOOD = "probe=probe"


@pytest.fixture
def stores(site):
    """Install a distribution that declares a kind and one that offers a plugin of it; return a function that writes the latter."""
    site.module("made_up_stores", KIND)
    site.distribution("mesh-stores", "[mesh.kinds]\nstores = made_up_stores:STORES\n", version="3.1")
    site.distribution("disks", "[mesh.stores]\ndisk = made_up_disk\n")

    def write(more=GOOD, source=STORE, answer="ProbeResult.yes(StoreCapabilities(True))"):
        site.module("made_up_disk", source.replace("{more}", more).replace("{answer}", answer))
        import made_up_stores

        return made_up_stores.STORES

    return write


class Quiet(list[PluginLoadError]):
    def __call__(self, error):
        self.append(error)


# Declared kinds.


@pytest.mark.parametrize("kind", [BYPASSES, COMMANDS, DOCTOR_CHECKS, POLICIES], ids=lambda kind: kind.word)
def test_own_kinds_keep_the_contract(kind):
    suite = type("Suite", (KindConformance,), {"kind": kind})()
    for promise in (each for each in dir(suite) if each.startswith("test_")):
        getattr(suite, promise)()


def test_a_declared_kind_is_found_and_its_plugins_are_used(stores, site):
    kind = stores()
    warned = Quiet()
    manager = PluginManager(warn=warned)
    assert kind in manager.kinds()
    plugin = manager.get(kind, "disk")
    assert manager.probe(plugin).capabilities.durable is True
    (report,) = (each for each in manager.survey() if each.name == "disk")
    assert (report.kind, report.status, report.capabilities) == ("store", "available", {"durable": True})
    assert warned == []


def test_listing_names_of_a_declared_kind_imports_nothing(stores, site):
    """MAN-1, MAN-2."""
    kind = stores()
    (site.path / "made_up_stores.imported").unlink()
    del sys.modules["made_up_stores"]
    manager = PluginManager()
    assert manager.names(kind) == ("disk",)
    assert manager.get(COMMANDS, "doctor").name == "doctor"
    assert "made_up_stores" not in sys.modules
    assert "made_up_disk" not in sys.modules


def test_mesh_plugins_lists_plugins_of_a_declared_kind(stores, site):
    stores()
    done = subprocess.run(
        [sys.executable, "-m", "mesh_core", "plugins", "--json"],
        env={"PYTHONPATH": str(site.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    (shown,) = (each for each in json.loads(done.stdout)["plugins"] if each["name"] == "disk")
    assert (shown["kind"], shown["status"], shown["capabilities"]) == (
        "store",
        "available",
        {"durable": True},
    )


def test_a_misspelt_group_is_compared_with_declared_kinds(stores, site):
    stores()
    site.distribution("typo", "[mesh.store]\nx = made_up_x\n")
    warned = Quiet()
    PluginManager(warn=warned).survey()
    (error,) = (each for each in warned if each.distribution == "typo")
    assert "did you mean 'mesh.stores'?" in str(error)


def test_a_hook_of_another_declared_kind_in_the_same_module_is_known(stores, site):
    """MAN-4."""
    stores(
        source=STORE
        + "@hookimpl\ndef mesh_register_commands():\n    yield CommandPlugin(name='disks', api_version=1, create=dict)\n"
    )
    site.distribution("more", "[mesh.commands]\ndisks = made_up_disk\n")
    assert PluginManager().get(COMMANDS, "disks").name == "disks"


def test_a_misspelt_hook_is_compared_with_hooks_of_declared_kinds(stores, site):
    kind = stores(source=STORE.replace("def mesh_register_stores", "def mesh_register_store"))
    with pytest.raises(
        PluginLoadError, match=r"there is no hook 'mesh_register_store'; did you mean 'mesh_r\w+stores'"
    ):
        PluginManager(warn=Quiet()).get(kind, "disk")


# Checks of plugins of such a kind.


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ("", "it needs a probe that returns StoreCapabilities, and has none"),
        (GOOD + ", size=3", "unexpected keyword argument 'size'"),
    ],
)
def test_a_plugin_that_does_not_fit_its_kind_does_not_load(stores, more, cause):
    kind = stores(more)
    with pytest.raises(PluginLoadError) as caught:
        PluginManager(warn=Quiet()).get(kind, "disk")
    assert cause in caught.value.cause


def test_a_probe_without_the_capabilities_of_the_kind_is_a_no(stores):
    kind = stores(answer="ProbeResult.yes()")
    manager = PluginManager(warn=Quiet())
    result = manager.probe(manager.get(kind, "disk"))
    assert not result
    assert result.reason == "its probe must return StoreCapabilities, got NoneType"
    assert result.remedy == "report this to the author of disks 1.0"


def test_a_command_has_no_capabilities(site):
    source = (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Some:\n    n: int = 1\n"
        "@hookimpl\ndef mesh_register_commands():\n"
        "    yield CommandPlugin(name='talk', api_version=1, create=dict, probe=lambda: ProbeResult.yes(Some()))\n"
    )
    site.command("talk", distribution="talker", source=source)
    manager = PluginManager()
    result = manager.probe(manager.get(COMMANDS, "talk"))
    assert result.reason == "its probe must return no capabilities, got Some"


def test_a_plugin_for_a_newer_contract_names_the_owner_of_the_kind(stores):
    kind = stores(source=STORE.replace("api_version=2", "api_version=3"))
    with pytest.raises(PluginLoadError) as caught:
        PluginManager(warn=Quiet()).get(kind, "disk")
    assert caught.value.cause == (
        "it was written for version 3 of the store contract; mesh-stores 3.1 speaks version 2"
    )
    assert caught.value.remedy == "upgrade mesh-stores, or install an older disks"


def test_a_suite_of_a_declared_kind_notices_broken_promises(stores):
    kind = stores()

    class StoreConformance(PluginConformance):
        pass

    StoreConformance.kind = kind

    def failures(plugin):
        suite, failed = (
            type("Suite", (StoreConformance,), {"plugin": plugin, "distribution": "disks"})(),
            set(),
        )
        for promise in (each for each in dir(suite) if each.startswith("test_")):
            try:
                getattr(suite, promise)()
            except Exception:
                failed.add(promise)
        return failed

    good = PluginManager().get(kind, "disk")
    assert failures(good) == set()
    assert failures(kind.descriptor(name="disk", api_version=3, create=dict)) >= {
        "test_api_version_is_spoken_here",
        "test_capabilities_are_those_of_the_kind",
        "test_installed_under_its_name",
    }
    assert "test_descriptor_is_of_the_kind" in failures(
        CommandPlugin(name="disk", api_version=1, create=dict)
    )


# Wrong declarations.

WRONG = {
    "missing module": ("stores = no_such_module_at_all:X", "", "its import raised: ModuleNotFoundError"),
    "no kind": (
        "stores = made_up_stores:StorePlugin",
        "",
        "made_up_stores:StorePlugin must be a PluginKind, got type",
    ),
    "another name": ("store = made_up_stores:STORES", "", "the entry point's name must be 'stores'"),
    "another owner": (
        "stores = made_up_stores:STORES",
        "STORES = PluginKind(word='store', group='mesh.stores', hook='mesh_x', descriptor=StorePlugin, api_version=1, owner='other')",
        "its owner must be 'mesh-stores', got 'other'",
    ),
    "a hook that is taken": (
        "stores = made_up_stores:STORES",
        "STORES = PluginKind(word='store', group='mesh.stores', hook='mesh_register_commands', descriptor=StorePlugin, api_version=1, owner='mesh_stores')",
        "mesh-core has a hook of the name 'mesh_register_commands', for the kind 'command'",
    ),
}


@pytest.mark.parametrize(("entry", "more", "cause"), WRONG.values(), ids=WRONG.keys())
def test_a_broken_declaration_is_reported_and_harms_no_other_kind(site, entry, more, cause):
    site.module("made_up_stores", KIND + more)
    site.distribution("mesh-stores", f"[mesh.kinds]\n{entry}\n", version="3.1")
    site.distribution("disks", "[mesh.stores]\ndisk = made_up_disk\n")
    warned = Quiet()
    manager = PluginManager(warn=warned)
    assert COMMANDS in manager.kinds()
    reports = manager.survey()
    (kind,) = (each for each in reports if each.kind == "kind")
    assert cause in kind.reason
    assert kind.distribution == "mesh-stores"
    assert any(each.name == "doctor" and each.status == "available" for each in reports)
    (plugin,) = (each for each in reports if each.distribution == "disks")
    assert plugin.status == "broken"
    manager.survey()
    assert len([each for each in warned if each.distribution == "mesh-stores"]) == 1


def test_two_packages_that_declare_one_kind_are_both_named(stores, site):
    stores()
    site.distribution("copycat", "[mesh.kinds]\nstores = made_up_stores:STORES\n")
    reports = [each for each in PluginManager(warn=Quiet()).survey() if each.kind == "kind"]
    assert {each.reason for each in reports} == {"both copycat 1.0 and mesh-stores 3.1 offer it"}


@pytest.mark.parametrize("name", ["commands", "another"])
def test_a_plugin_that_takes_a_name_of_core_affects_only_itself(site, name):
    more = (
        f"STORES = PluginKind(word='store', group='mesh.{name}', hook='mesh_register_commands',"
        " descriptor=StorePlugin, api_version=1, owner='taker')"
    )
    site.module("made_up_stores", KIND + more)
    site.distribution("taker", f"[mesh.kinds]\n{name} = made_up_stores:STORES\n")
    manager = PluginManager(warn=Quiet())
    assert COMMANDS in manager.kinds()
    reports = manager.survey()
    (taken,) = (each for each in reports if each.kind == "kind")
    assert "taker" in taken.remedy
    (doctor,) = (each for each in reports if (each.kind, each.name) == ("command", "doctor"))
    assert doctor.status == "available"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"word": ""}, "word of a plugin kind must be one line"),
        ({"group": "stores"}, "group of the kind 'store' must be 'mesh.' and"),
        ({"group": "mesh.kinds"}, "other than 'kinds', got 'mesh.kinds'"),
        ({"hook": "register"}, "hook of the kind 'store' must be 'mesh_' and"),
        ({"descriptor": dict}, "descriptor of the kind 'store' must be a subclass of Plugin"),
        ({"api_version": 0}, "api_version of the kind 'store' must be a whole number from 1, got 0"),
        ({"owner": ""}, "owner of the kind 'store' must be the name of a distribution"),
        ({"capabilities": dict}, "capabilities of the kind 'store' must be a frozen dataclass"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_invalid_kind_is_refused(change, error):
    @dataclass(frozen=True, kw_only=True)
    class StorePlugin(Plugin[None]):
        pass

    good = {
        "word": "store",
        "group": "mesh.stores",
        "hook": "mesh_register_stores",
        "descriptor": StorePlugin,
        "api_version": 1,
        "owner": "mesh-stores",
    }
    assert PluginKind(**good).plural == "stores"
    with pytest.raises((TypeError, ValueError), match=error):
        PluginKind(**good | change)


# Names that core knows without the package.


def test_a_known_name_that_is_not_installed_names_its_package(monkeypatch):
    hide(monkeypatch, "mesh-supervision")
    with pytest.raises(PluginError) as caught:
        PluginManager().get(POLICIES, "one_for_one")
    assert str(caught.value) == (
        "policy 'one_for_one' is in mesh-supervision, which is not installed: pip install mesh-supervision"
    )
    assert caught.value.remedy == "pip install mesh-supervision"


def test_a_known_name_that_an_installed_package_lacks_asks_for_an_upgrade(site):
    site.distribution("mesh-supervision", "", version="0.0.1")
    with pytest.raises(
        PluginError, match=r"installed mesh-supervision 0\.0\.1 does not offer it: pip install --upgrade"
    ):
        PluginManager().get(POLICIES, "one_for_one")


def test_a_known_name_offered_by_another_package_is_used(site):
    site.module(
        "made_up_own",
        "from mesh_core.plugins import *\n@hookimpl\ndef mesh_register_policies():\n"
        "    yield PolicyPlugin(name='one_for_one', api_version=1, create=dict)\n",
    )
    site.distribution("own", "[mesh.policies]\none_for_one = made_up_own\n")
    assert PluginManager().get(POLICIES, "one_for_one").create is dict


def test_a_group_whose_owner_is_not_installed_is_unavailable_and_names_the_owner(site):
    site.distribution("rails", "[mesh.transports]\nfast = made_up_rails\n")
    warned = Quiet()
    (report,) = (each for each in PluginManager(warn=warned).survey() if each.distribution == "rails")
    assert (report.kind, report.name, report.status) == ("group", "mesh.transports", "unavailable")
    assert "declared by mesh-rdma" in report.reason
    assert report.remedy == "pip install --upgrade mesh-rdma"
    assert not [each for each in warned if each.distribution == "rails"]


def hide(monkeypatch, name):
    """Make a distribution impossible to find, whether it is installed or not."""
    import importlib.metadata

    real = importlib.metadata.version

    def version(asked):
        if asked == name:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(asked)

    monkeypatch.setattr(importlib.metadata, "version", version)
