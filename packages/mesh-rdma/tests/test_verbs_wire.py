"""The bytes of the transport `ibverbs`: both engines write the same, and refuse what neither would write. No device is needed."""

import dataclasses
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_rdma import InvalidTransfer, TransportUnavailable
from mesh_rdma._pyverbs._wire import (
    ACCEPT,
    CONNECT,
    Answer,
    Connect,
    Damaged,
    End,
    Link,
    Rail,
    Section,
    Side,
    Talk,
    decode_accept,
    decode_ask,
    encode_accept,
    encode_ask,
)

TALK = Talk(b"\x01" * 16, b"\x02" * 16, b"\x03" * 16, b"\x04" * 16)
END = End(0x123456, 0xABCDEF, 3, 16)


def rail(n):
    return Rail(bytes([n]) * 16, n, Link.INFINIBAND if n % 2 else Link.ETHERNET, 3, 100_000, 7 + n)


def section(rails=2):
    return Section(
        writable=True,
        nearest=rails - 1,
        port=4000,
        address=IPv6Address("::ffff:10.77.0.1"),
        door=b"\x09" * 16,
        at=0x7F00_0000_1000,
        length=4096,
        slot=3,
        generation=4,
        rails=tuple(rail(n) for n in range(rails)),
    )


@pytest.mark.parametrize("rails", [1, 2, 3, 4])
def test_a_section_is_what_it_was_and_short(rails):
    data = section(rails).encode()
    assert len(data) <= 256
    assert Section.decode(data) == section(rails)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(InvalidTransfer):
            Section.decode(wrong)


def test_a_section_is_laid_out_as_agreed():
    data = section().encode()
    assert len(data) == 61 + 2 * 28
    assert data[:4] == bytes([1, 0b011, 0xA0, 0x0F])
    assert data[4:20] == bytes([*[0] * 10, 0xFF, 0xFF, 10, 77, 0, 1])
    assert data[20:36] == b"\x09" * 16
    assert data[36:44] == (0x7F00_0000_1000).to_bytes(8, "little")
    assert data[44:52] == (4096).to_bytes(8, "little")
    assert data[52:61] == bytes([3, 0, 0, 0, 4, 0, 0, 0, 2])
    assert data[61 + 16 : 61 + 28] == bytes([0, 0, 2, 3, 0xA0, 0x86, 1, 0, 7, 0, 0, 0])


@pytest.mark.parametrize(
    ("at", "byte"), [(1, 8), (1, 0b101), (60, 0), (60, 3), (60, 5), (61 + 18, 3), (61 + 19, 0), (61 + 19, 6)]
)
def test_a_section_that_makes_no_sense_is_refused(at, byte):
    data = bytearray(section().encode())
    data[at] = byte
    with pytest.raises(InvalidTransfer):
        Section.decode(bytes(data))


def test_memory_beyond_the_last_address_is_refused():
    last = dataclasses.replace(section(), at=(1 << 64) - 4096, length=4096)
    assert Section.decode(last.encode()) == last
    with pytest.raises(InvalidTransfer, match="beyond"):
        Section.decode(dataclasses.replace(last, length=4097).encode())


@pytest.mark.parametrize(("rails", "nearest"), [(1, 0), (4, 3)])
def test_the_nearest_of_one_to_four_rails_is_one_of_them(rails, nearest):
    accepted = dataclasses.replace(section(rails), nearest=nearest)
    assert Section.decode(accepted.encode()) == accepted
    for wrong in (
        dataclasses.replace(accepted, nearest=rails),
        dataclasses.replace(section(5), nearest=0),
        dataclasses.replace(section(1), nearest=0, rails=()),
    ):
        with pytest.raises(InvalidTransfer, match="is damaged"):
            Section.decode(wrong.encode())


@pytest.mark.parametrize("mtu", [1, 5])
def test_the_least_and_the_largest_mtu(mtu):
    port = dataclasses.replace(rail(1), mtu=mtu)
    assert Rail.decode(port.encode()) == port
    with pytest.raises(InvalidTransfer, match="unknown kind of port"):
        Rail.decode(dataclasses.replace(port, mtu=0 if mtu == 1 else 6).encode())
    assert dataclasses.replace(END, mtu=mtu).check().mtu == mtu


def test_another_version_is_left_to_other_transports():
    with pytest.raises(TransportUnavailable, match="version 2"):
        Section.decode(b"\x02" + section().encode()[1:])


@given(st.binary(max_size=260))
def test_bytes_are_a_section_or_refused(data):
    try:
        found = Section.decode(data)
    except (InvalidTransfer, TransportUnavailable):
        return
    assert found.encode() == data


@given(st.integers(0, 116), st.integers(0, 255))
def test_a_changed_section_is_what_it_says_or_refused(at, byte):
    data = bytearray(section().encode())
    data[at] = byte
    test_bytes_are_a_section_or_refused.hypothesis.inner_test(bytes(data))


def test_proofs_and_seals_are_as_agreed():
    """Numbers that the other engine's tests have too."""
    assert TALK.prove(Side.CLIENT).hex() == "268a9cb5f4e56a41206e59b07fe1ff699b874ad46b300e56aae12d874e63b626"
    accepted = encode_accept(END, TALK)
    assert len(accepted) == ACCEPT
    assert accepted.hex() == "0056341200efcdab0003104b8b4cd7ad35bff8c39eb271a6d0aae7"


def test_a_proof_is_good_for_one_side_one_connection_and_one_key():
    proof = TALK.prove(Side.SERVER)
    assert TALK.proves(Side.SERVER, proof)
    assert not TALK.proves(Side.CLIENT, proof)
    for field in ("door", "realm", "client", "server"):
        assert not dataclasses.replace(TALK, **{field: b"\x08" * 16}).proves(Side.SERVER, proof), field


def test_what_is_said_of_queue_pairs_is_sealed_to_the_last_byte():
    asked = Connect(1, b"\x05" * 16, 6, END)
    data = asked.encode(TALK)
    assert len(data) == CONNECT
    assert Connect.decode(data, TALK) == asked
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(Damaged):
            Connect.decode(bytes(changed), TALK)
    with pytest.raises(Damaged):
        Connect.decode(data, dataclasses.replace(TALK, server=b"\x08" * 16))
    with pytest.raises(Damaged):
        decode_accept(Talk.seal(TALK, Side.CLIENT, encode_accept(END, TALK)[:11]), TALK)
    assert decode_accept(encode_accept(END, TALK), TALK) == END
    assert decode_accept(encode_accept(None, TALK), TALK) is None


@pytest.mark.parametrize(
    "changes",
    [{"qpn": 1 << 24}, {"psn": 1 << 24}, {"mtu": 0}, {"mtu": 6}],
    ids=lambda changes: next(iter(changes)),
)
def test_numbers_that_no_queue_pair_has_are_refused(changes):
    wrong = dataclasses.replace(END, **changes)
    with pytest.raises(Damaged):
        decode_accept(encode_accept(wrong, TALK), TALK)
    with pytest.raises(Damaged):
        Connect.decode(Connect(0, b"\x05" * 16, 6, wrong).encode(TALK), TALK)


def test_numbers_of_queue_pairs_have_24_bits():
    last = dataclasses.replace(END, qpn=(1 << 24) - 1, psn=(1 << 24) - 1)
    assert decode_accept(encode_accept(last, TALK), TALK) == last


def test_both_use_what_both_can():
    assert END.agreed(End(1, 2, 5, 4)) == End(END.qpn, END.psn, 3, 4)


def test_questions_name_an_export_and_show_its_token():
    asked = encode_ask(1, 2, b"\x03" * 16)
    assert len(asked) == 25
    assert decode_ask(asked) == (2 << 32 | 1, b"\x03" * 16)
    with pytest.raises(Damaged):
        decode_ask(b"B" + asked[1:])
    assert [answer.value for answer in (Answer.LIVE, Answer.GONE, Answer.REFUSED)] == [0, 1, 2]
