"""What squeue says, in the forms of several versions of Slurm, from answers that were written down."""

from __future__ import annotations

import pytest

from mesh_launchers._squeue import Queued, grace_of, hostnames, notice_in, queued


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # 22.05
        ("RUNNING|None|host[1-3]|UNLIMITED\n", Queued("RUNNING", "", "host[1-3]")),
        ("RUNNING|None|host2|1-00:00:10\n", Queued("RUNNING", "", "host2", 86410)),
        ("RUNNING|None|host2|1-02:03:04\n", Queued("RUNNING", "", "host2", 93784)),
        ("RUNNING|None|host2|0:01\n", Queued("RUNNING", "", "host2", 1)),
        ("RUNNING|None|host2|x-0:01\n", Queued("RUNNING", "", "host2")),
        ("PENDING|Resources||5:00\n", Queued("PENDING", "Resources")),
        ("PENDING|BeginTime||UNLIMITED\n", Queued("PENDING", "BeginTime")),
        # 23.11 puts long reasons in words of their own, with nodes and blanks.
        (
            "PENDING|ReqNodeNotAvail, UnavailableNodes:host[1-2]||2:00:00\n",
            Queued("PENDING", "ReqNodeNotAvail, UnavailableNodes:host[1-2]"),
        ),
        ("PENDING|(Priority)|(null)|1:00\n", Queued("PENDING", "Priority")),
        # 24.11
        ("CANCELLED by 1000|None|n/a|0:00\n", Queued("CANCELLED")),
        ("PREEMPTED|None|host[1-3]|0:00\n", Queued("PREEMPTED", "", "host[1-3]")),
        ("NODE_FAIL+|NodeDown|host1|INVALID\n", Queued("NODE_FAIL", "NodeDown", "host1")),
        # A job that was requeued, and the one before it of that name.
        ("FAILED|NonZeroExitCode|host1|0:00\nPENDING|Priority||0:30\n", Queued("PENDING", "Priority")),
        # It was asked too late, or is not there.
        ("", Queued()),
        ("slurm_load_jobs error: Unable to contact slurm controller\n", Queued("slurm_load_jobs")),
        ("RUNNING\n", Queued("RUNNING")),
    ],
)
def test_answers_of_several_versions(answer: str, expected: Queued) -> None:
    assert queued(answer) == expected


@pytest.mark.parametrize(
    ("answer", "never"),
    [
        ("PENDING|PartitionNodeLimit||1:00", True),
        ("PENDING|launch failed requeued held||1:00", True),
        ("PENDING|launch_failed_requeued_held||1:00", True),
        ("PENDING|JobHeldUser||1:00", True),
        ("PENDING|AccountNotAllowed||1:00", True),
        # Those pass as other jobs end.
        ("PENDING|QOSMaxJobsPerUserLimit||1:00", False),
        ("PENDING|AssocGrpNodeLimit||1:00", False),
        ("PENDING|Resources||1:00", False),
        ("RUNNING|None|host1|1:00", False),
    ],
)
def test_what_never_starts(answer: str, never: bool) -> None:
    assert queued(answer).never_starts is never


@pytest.mark.parametrize(
    "state", ["CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "FAILED"]
)
def test_ends_are_reported_in_slurms_words(state: str) -> None:
    assert queued(f"{state}|None|host1|0:00").has_ended
    assert str(queued(f"{state}|Reason|host1|0:00")) == f"{state}: Reason"


def test_names_of_nodes() -> None:
    assert hostnames("host[1-3]") == ["host1", "host2", "host3"]
    assert hostnames("a") == ["a"]
    assert hostnames("") == []
    assert hostnames("gpu[08-11,20],cpu1,rack[1-2]n[1,3]-ib") == [
        *("gpu08", "gpu09", "gpu10", "gpu11", "gpu20", "cpu1"),
        *("rack1n1-ib", "rack1n3-ib", "rack2n1-ib", "rack2n3-ib"),
    ]


@pytest.mark.parametrize(
    ("config", "partitions", "expected"),
    [
        # 22.05
        ("KeepAliveTime           = SYSTEM_DEFAULT\nKillWait                = 30 sec\n", "", 30.0),
        ("KillWait = 5 sec\n", "PartitionName=urgent Default=NO GraceTime=60 Hidden=NO\n", 60.0),
        ("KillWait = 1 sec\n", "PartitionName=main Default=YES GraceTime=0\n", 1.0),
        (
            "KillWait = 5 sec\n",
            "PartitionName=urgent Default=NO GraceTime=60\nPartitionName=main Default=YES GraceTime=0\n",
            5.0,
        ),
        ("", "", None),
        ("scontrol: error: no configuration\n", "", None),
    ],
)
def test_how_long_slurm_waits_before_it_kills(config: str, partitions: str, expected: float | None) -> None:
    assert grace_of(config, partitions) == expected


@pytest.mark.parametrize(
    ("output", "notice"),
    [
        ("", ""),
        ("*** an actor prints stars ***", ""),
        ("*** STEP 7.0 ON host1 CANCELLED \x1b]0;by an actor\x07 ***", ""),
        (
            (
                "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
                "slurmstepd: error: *** STEP 7.0 ON host1 CANCELLED AT 2026-11-28T10:00:00 ***\n"
                "srun: error: host1: task 0: Terminated"
            ),
            "STEP 7.0 ON host1 CANCELLED AT 2026-11-28T10:00:00",
        ),
        (
            (
                "*** JOB 7 ON host1 CANCELLED AT 2026-11-28T10:00:00 DUE TO PREEMPTION ***\n"
                "0: *** JOB 8 ON host2 CANCELLED AT 2026-11-28T11:00:00 DUE TO TIME LIMIT ***"
            ),
            "JOB 8 ON host2 CANCELLED AT 2026-11-28T11:00:00 DUE TO TIME LIMIT",
        ),
    ],
)
def test_what_slurm_prints_about_a_signal_is_found(output: str, notice: str) -> None:
    assert notice_in(output) == notice
