"""Leases as Redis keeps them, and the names of the keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.errors import ConfigurationError
from sangam_core.lease import LEDGER_VERSION, LedgerKeys, WorkerLease
from sangam_core.placement import Role
from sangam_core.wire import PROTOCOL_VERSION

COUNTS = st.integers(0, 2**40)
TEXTS = st.text(max_size=20)
LEASES = st.builds(
    WorkerLease,
    worker_id=TEXTS,
    epoch=TEXTS,
    role=st.sampled_from(Role),
    boot_role=st.sampled_from(Role),
    url=TEXTS,
    model=TEXTS,
    protocol=COUNTS,
    version=TEXTS,
    is_draining=st.booleans(),
    total_pages=COUNTS,
    free_pages=COUNTS,
    page_tokens=COUNTS,
    block_length=COUNTS,
    max_sequence_tokens=COUNTS,
    num_waiting=COUNTS,
    num_running=COUNTS,
    carried_tokens=COUNTS,
    tau_tokens=COUNTS,
)
REQUIRED = sorted(name for name, field in WorkerLease.model_fields.items() if field.is_required())


def lease(*, role: Role = Role.COLOCATED, is_draining: bool = False) -> WorkerLease:
    return WorkerLease(
        worker_id="w0",
        epoch="4f1c",
        role=role,
        boot_role=Role.COLOCATED,
        url="http://10.0.0.7:21034",
        model="small",
        is_draining=is_draining,
        total_pages=512,
        free_pages=500,
        page_tokens=16,
        block_length=32,
        max_sequence_tokens=4096,
    )


@given(LEASES)
def test_a_lease_survives_the_hash(published: WorkerLease) -> None:
    fields = published.fields()
    assert set(fields) == set(WorkerLease.model_fields)
    assert all(isinstance(value, str) for value in fields.values())
    assert WorkerLease.from_fields(fields) == published


def test_the_fields_are_what_a_lua_script_can_read() -> None:
    fields = lease(role=Role.PREFILL, is_draining=True).fields()
    assert (fields["role"], fields["is_draining"], fields["free_pages"]) == ("prefill", "1", "500")
    assert lease().fields()["is_draining"] == "0"
    assert fields["protocol"] == str(PROTOCOL_VERSION)


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_torn_lease_is_none(missing: str) -> None:
    fields = lease().fields()
    del fields[missing]
    assert WorkerLease.from_fields(fields) is None


def test_an_empty_hash_is_no_lease() -> None:
    assert WorkerLease.from_fields({}) is None


@pytest.mark.parametrize(
    ("name", "value"), [("role", "oracle"), ("free_pages", "many"), ("is_draining", "maybe")]
)
def test_a_lease_that_cannot_be_read_is_none(name: str, value: str) -> None:
    assert WorkerLease.from_fields({**lease().fields(), name: value}) is None


def test_a_newer_lease_is_kept_and_its_unknown_fields_dropped() -> None:
    newer = {**lease().fields(), "temperature_celsius": "61", "protocol": str(PROTOCOL_VERSION + 1)}
    read = WorkerLease.from_fields(newer)
    assert read is not None
    assert read.protocol == PROTOCOL_VERSION + 1
    assert read == lease().model_copy(update={"protocol": PROTOCOL_VERSION + 1})


def test_an_older_lease_without_later_fields_is_kept() -> None:
    fields = lease().fields()
    for name in set(fields) - set(REQUIRED):
        del fields[name]
    assert WorkerLease.from_fields(fields) == lease()


def test_the_fields_that_keep_a_lease_from_being_read_are_named() -> None:
    fields = lease().fields()
    assert WorkerLease.unreadable_fields({**fields, "of_a_newer_version": "1"}) == ()
    del fields["url"]
    assert WorkerLease.unreadable_fields({**fields, "role": "chef"}) == ("role", "url")


def test_every_key_carries_the_namespace_as_hash_tag_and_the_version() -> None:
    keys = LedgerKeys("blue")
    names = [
        keys.workers,
        keys.worker("w0"),
        keys.desired("w0"),
        keys.refused("w0"),
        keys.wake_channel,
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{{blue}}:v{LEDGER_VERSION}:") for name in names)


@pytest.mark.parametrize("namespace", ["", "a{b", "a}b", "{}"])
def test_a_namespace_that_would_change_the_hash_tag_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="redis namespace"):
        LedgerKeys(namespace)
