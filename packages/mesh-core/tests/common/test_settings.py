"""Settings: where a value comes from, and which are refused."""

import asyncio
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from mesh_core._common.errors import MeshError
from mesh_core._common.settings import Settings, SettingsError, configure, configured, current_settings


def test_defaults():
    assert Settings().as_dict() == {
        "spin_us": 50.0,
        "spawn_timeout": 60.0,
        "stop_timeout": 5.0,
        "sigterm_grace": 8.0,
        "preemption_grace": 0.0,
        "link_budget": 256 * 1024**2,
        "mailbox_budget": 64 * 1024**2,
        "reply_budget": 0,
        "heartbeat_timeout": 10.0,
        "fan_out": 16,
        "ref_budget": 0,
        "bypass_threshold": 1024**2,
        "shm_budget": 0,
        "shm_threshold": 64 * 1024,
        "shm_idle": 10.0,
        "direct_links": 64,
        "log_level": "INFO",
        "log_window": 3.0,
        "log_ignore_numbers": False,
        "log_records": True,
        "log_wait": 0.1,
        "progress": "AUTO",
        "post_mortem": False,
    }


def test_settings_are_frozen_and_picklable():
    settings = Settings(spin_us=1)
    with pytest.raises(FrozenInstanceError):
        settings.spin_us = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_ref_budget_of_zero_is_an_eighth_of_memory():
    assert Settings().ref_bytes == Settings().shm_bytes // 2
    assert Settings(ref_budget=1).ref_bytes == 1


def test_shm_budget_of_zero_is_a_quarter_of_memory():
    total = int(re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert Settings().shm_bytes == pytest.approx(total / 4, rel=0.01)
    assert Settings(shm_budget=1).shm_bytes == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spin_us", -1),
        ("spin_us", "50"),
        ("spin_us", None),
        ("spin_us", True),
        ("spin_us", float("nan")),
        ("spin_us", float("inf")),
        ("spawn_timeout", -0.1),
        ("spawn_timeout", 10**400),
        ("stop_timeout", 86_401),
        ("link_budget", 1024),
        ("link_budget", 1e9),
        ("shm_budget", -1),
        ("shm_threshold", 0),
        ("shm_threshold", 10**400),
        ("log_level", "LOUD"),
        ("log_level", 10),
        ("post_mortem", 1),
    ],
)
def test_wrong_type_or_range_names_setting_value_and_source(name, value):
    """SET-1."""
    before = current_settings()
    for source, act in {
        "Settings()": lambda: Settings(**{name: value}),
        "configure()": lambda: configure(**{name: value}),
        "configured()": lambda: configured(**{name: value}).__enter__(),
    }.items():
        with pytest.raises(SettingsError, match="^" + re.escape(f"{source}: {name} must be ")) as caught:
            act()
        assert (caught.value.setting, caught.value.source) == (name, source)
        assert repr(value) in str(caught.value)
        assert isinstance(caught.value, MeshError)
        assert isinstance(caught.value, ValueError)
    assert current_settings() == before


SECONDS = (0.0, 86_400.0)
BYTES = (0, 2**62)
RANGES = {
    "spin_us": (0.0, 1e6),
    "spawn_timeout": SECONDS,
    "stop_timeout": SECONDS,
    "sigterm_grace": SECONDS,
    "preemption_grace": SECONDS,
    "link_budget": (64 * 1024, 2**62),
    "mailbox_budget": (64 * 1024, 2**62),
    "reply_budget": BYTES,
    "heartbeat_timeout": (0.05, 86_400.0),
    "fan_out": (1, 4096),
    "ref_budget": BYTES,
    "shm_budget": BYTES,
    "shm_threshold": (1, 2**62),
    "shm_idle": SECONDS,
    "direct_links": (0, 4096),
    "bypass_threshold": BYTES,
    "log_window": SECONDS,
    "log_wait": SECONDS,
}


def beyond(value, towards):
    """The nearest number of the same kind in that direction."""
    return value + (1 if towards > 0 else -1) if isinstance(value, int) else math.nextafter(value, towards)


def test_every_number_has_a_range():
    numbers = {each.name for each in fields(Settings) if type(getattr(Settings(), each.name)) in (int, float)}
    assert set(RANGES) == numbers


@pytest.mark.parametrize("name", RANGES)
def test_a_number_is_accepted_from_its_least_to_its_largest(name):
    """SET-1."""
    least, most = RANGES[name]
    for value in (least, most):
        assert getattr(Settings(**{name: value}), name) == value
    for value in (beyond(least, -math.inf), beyond(most, math.inf)):
        with pytest.raises(SettingsError, match=f"{name} must be between"):
            Settings(**{name: value})


def test_budgets_of_zero_are_parts_of_memory():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    none = Settings(shm_budget=0, ref_budget=0, reply_budget=0)
    assert (none.shm_bytes, none.ref_bytes, none.reply_bytes) == (memory // 4, memory // 8, memory // 4 * 3)
    one = Settings(shm_budget=1, ref_budget=1, reply_budget=1)
    assert (one.shm_bytes, one.ref_bytes, one.reply_bytes) == (1, 1, 1)


def test_numbers_and_words_are_normalized():
    settings = Settings(spin_us=0, log_level="debug")
    assert type(settings.spin_us) is float
    assert settings.log_level == "DEBUG"


def test_unknown_name_names_the_nearest():
    """SET-2, for an argument."""
    with pytest.raises(
        SettingsError, match=r"^configure\(\): no setting is called 'spin'; did you mean 'spin_us'\?$"
    ):
        configure(spin=1)
    with pytest.raises(
        SettingsError, match=r"no setting is called 'zzz'; there are: spin_us, .*log_level, .*post_mortem"
    ):
        configure(zzz=1)


def test_error_can_be_pickled():
    with pytest.raises(SettingsError) as caught:
        Settings(spin_us=-1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), vars(copy)) == (str(caught.value), vars(caught.value))


# --- the environment ---


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("MESH_SPIN_US", "0", "spin_us", 0.0),
        ("MESH_SPIN_US", " 2.5 ", "spin_us", 2.5),
        ("MESH_LINK_BUDGET", "1048576", "link_budget", 1024**2),
        ("MESH_LINK_BUDGET", "1_048_576", "link_budget", 1024**2),
        ("MESH_LINK_BUDGET", "2GiB", "link_budget", 2 * 1024**3),
        ("MESH_SHM_THRESHOLD", "32k", "shm_threshold", 32 * 1024),
        ("MESH_SHM_BUDGET", "5 MiB", "shm_budget", 5 * 1024**2),
        ("MESH_LOG_LEVEL", "debug", "log_level", "DEBUG"),
        ("MESH_LOG_LEVEL", "", "log_level", "INFO"),
        ("MESH_POST_MORTEM", "1", "post_mortem", True),
        ("MESH_POST_MORTEM", "Off", "post_mortem", False),
    ],
)
def test_variables(variable, text, name, value):
    assert getattr(Settings.from_env({variable: text, "PATH": "/bin"}), name) == value


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("MESH_SPIN_US", "soon", "spin_us must be a number of microseconds, got 'soon'"),
        ("MESH_SPIN_US", "-1", "spin_us must be between 0.0 and 1,000,000.0 microseconds, got -1.0"),
        ("MESH_SPIN_US", "nan", "spin_us must be between"),
        (
            "MESH_LINK_BUDGET",
            "lots",
            "link_budget must be a number of bytes (for example 65536, 64KiB, 256MiB), got 'lots'",
        ),
        ("MESH_LINK_BUDGET", "1.5GiB", "link_budget must be a number of bytes"),
        ("MESH_POST_MORTEM", "maybe", "post_mortem must be 1 or 0, got 'maybe'"),
        ("MESH_LINK_BUDGET", "1", "link_budget must be between 65,536 and"),
        (
            "MESH_LOG_LEVEL",
            "DEBIG",
            "log_level must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL, got 'DEBIG'; did you mean 'DEBUG'?",
        ),
    ],
)
def test_bad_variable_is_named(variable, text, said):
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({variable: text})
    assert str(caught.value).startswith(f"environment variable {variable}: {said}")
    assert caught.value.source == f"environment variable {variable}"


@pytest.mark.parametrize("variable", ["MESH_SPIN_USS", "MESH_SPIN_MS", "MESH_LOG_LEVLE", "MESH_SHM_BUGDET"])
def test_misspelt_variable_is_an_error(variable):
    """SET-2, for an environment variable."""
    with pytest.raises(SettingsError, match=rf"^environment variable {variable}: .*did you mean MESH_"):
        Settings.from_env({variable: "1"})


def test_unrelated_variables_are_ignored():
    others = {
        "MESH_PORT": "tcp://10.0.0.1:80",
        "MESH_SERVICE_HOST": "10.0.0.1",
        "MESH_RDMA_SHM_THRESHOLD": "1",
        "MESH_": "x",
    }
    assert Settings.from_env(others) == Settings()


def run(code, **environ):
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=50
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_environment_is_read_at_first_use_not_at_import():
    read = "from mesh_core._common.settings import *; import os\n{} \nprint(current_settings().spin_us, current_settings().stop_timeout)"
    assert run(read.format(""), MESH_SPIN_US="7") == "7.0 5.0"
    assert run(read.format("os.environ['MESH_SPIN_US'] = '8'")) == "8.0 5.0"
    assert run(read.format("configure(spin_us=9)"), MESH_SPIN_US="7", MESH_STOP_TIMEOUT="1") == "9.0 1.0"
    assert "environment variable MESH_SPIN_US" in run(read.format(""), MESH_SPIN_US="soon")


# --- configure and configured ---


def test_configure_is_for_the_whole_process_and_its_threads():
    code = (
        "import threading\n"
        "from mesh_core._common.settings import *\n"
        "before = current_settings()\n"
        "assert configure(spin_us=1) is current_settings()\n"
        "configure(stop_timeout=2)\n"
        "threading.Thread(target=lambda: print(current_settings().spin_us, current_settings().stop_timeout)).start()\n"
        "assert before.spin_us == 50"
    )
    assert run(code) == "1.0 2.0"


def test_configured_lasts_for_its_block():
    before = current_settings()
    with configured(spin_us=1) as outer:
        assert current_settings() is outer
        with configured(stop_timeout=2) as inner:
            assert (inner.spin_us, inner.stop_timeout) == (1.0, 2.0)
        assert current_settings() is outer
        configure(spin_us=3)
        assert current_settings().spin_us == 3.0
    assert current_settings() is before


def test_configured_is_seen_by_tasks_and_not_by_other_threads():
    seen = []

    async def task():
        seen.append(current_settings().spin_us)

    async def main():
        with configured(spin_us=1):
            started = asyncio.create_task(task())
        await started
        await task()

    asyncio.run(main())
    with configured(spin_us=1):
        thread = threading.Thread(target=lambda: seen.append(current_settings().spin_us))
        thread.start()
        thread.join()
    assert seen == [1.0, 50.0, 50.0]


def test_concurrent_changes_are_not_lost():
    names = ["spin_us", "spawn_timeout", "stop_timeout"]
    with configured():
        import contextvars

        def change(name):
            for value in range(200):
                configure(**{name: value})

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(change, name)) for name in names
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert [getattr(current_settings(), name) for name in names] == [199.0] * 3


def test_block_that_raises_restores_settings():
    before = current_settings()

    def fail():
        with configured(stop_timeout=2):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert current_settings() is before


def test_every_setting_is_documented(page):
    text = page("docs/reference/settings.md")
    for each in fields(Settings):
        assert f"`{each.name}`" in text
        assert f"`MESH_{each.name.upper()}`" in text
