//! How both ends of a connection prove to each other that they know the owner's door key, and how an owner limits what
//! strangers cost it. Only the owner's handles carry the key, and neither end reveals it.

use crate::bytes::part;
use crate::handle::{RealmId, Token};
use crate::lock;
use crate::realm::random;
use ring::hmac;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// The client's first message: the magic, a nonce, and the owner that it wants.
pub(crate) const HELLO: usize = 4 + 16 + 16;
/// The owner's answer: its nonce and its proof.
pub(crate) const WELCOME: usize = 16 + PROOF;
/// The client's proof.
pub(crate) const PROOF: usize = 32;
/// What authenticates a message after the handshake.
pub(crate) const SEAL: usize = 16;

type Nonce = [u8; 16];

/// The handshake of one transport. The words keep a proof of one side or transport from being used for another.
#[derive(Debug)]
pub(crate) struct Protocol {
    pub(crate) magic: [u8; 4],
    pub(crate) owner: &'static [u8],
    pub(crate) client: &'static [u8],
}

/// Which end a proof or a message is from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Owner,
    Client,
}

/// A connection on which both ends have drawn their nonces.
#[derive(Clone, Debug)]
pub(crate) struct Talk {
    pub(crate) protocol: &'static Protocol,
    pub(crate) door: Token,
    pub(crate) realm: RealmId,
    pub(crate) client: Nonce,
    pub(crate) owner: Nonce,
}

impl Protocol {
    pub(crate) fn hello(&self, client: &Nonce, realm: &RealmId) -> Vec<u8> {
        [self.magic.as_slice(), client, realm].concat()
    }

    /// The owner's part: checks that a hello is meant for it and makes the answer. None for a stranger's hello.
    pub(crate) fn answer(
        &'static self,
        hello: &[u8; HELLO],
        door: Token,
        realm: &RealmId,
    ) -> Option<(Talk, [u8; WELCOME])> {
        if hello[..4] != self.magic || hello[20..] != *realm {
            return None;
        }
        let talk = Talk { protocol: self, door, realm: *realm, client: part(hello, 4), owner: random().ok()? };
        let welcome = [talk.owner.as_slice(), &talk.prove(Side::Owner)].concat();
        Some((talk, part(&welcome, 0)))
    }

    /// The client's part: none if the welcome is not from an owner that knows the door key.
    pub(crate) fn recognise(&'static self, welcome: &[u8], door: Token, realm: RealmId, client: Nonce) -> Option<Talk> {
        let talk = Talk { protocol: self, door, realm, client, owner: part(welcome, 0) };
        talk.proves(Side::Owner, &part(welcome, 16)).then_some(talk)
    }
}

impl Talk {
    fn said(&self, side: Side, message: &[u8]) -> Vec<u8> {
        let side = match side {
            Side::Owner => self.protocol.owner,
            Side::Client => self.protocol.client,
        };
        [side, &self.realm, &self.client, &self.owner, message].concat()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.door)
    }

    /// Proves that this side knows the door key.
    pub(crate) fn prove(&self, side: Side) -> [u8; PROOF] {
        part(hmac::sign(&self.key(), &self.said(side, &[])).as_ref(), 0)
    }

    pub(crate) fn proves(&self, side: Side, proof: &[u8; PROOF]) -> bool {
        hmac::verify(&self.key(), &self.said(side, &[]), proof).is_ok()
    }

    pub(crate) fn seal(&self, side: Side, mut message: Vec<u8>) -> Vec<u8> {
        let tag = hmac::sign(&self.key(), &self.said(side, &message));
        message.extend_from_slice(&tag.as_ref()[..SEAL]);
        message
    }

    /// Returns the message if that side sealed it for this connection.
    pub(crate) fn open<'a>(&self, side: Side, sealed: &'a [u8]) -> Option<&'a [u8]> {
        let (message, seal) = sealed.split_at_checked(sealed.len().checked_sub(SEAL)?)?;
        let tag = hmac::sign(&self.key(), &self.said(side, message));
        crate::handle::is_same(&part(tag.as_ref(), 0), &part(seal, 0)).then_some(message)
    }
}

/// Counts connections that have not proved who they are.
#[derive(Debug, Default)]
pub(crate) struct Strangers {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Strangers {
    /// The most strangers at once.
    const MOST: usize = 16;

    /// Waits until there is room for another stranger. Each remains one for a bounded time only.
    pub(crate) fn wait(&self) {
        let waited = self.fewer.wait_while(lock(&self.count), |count| *count >= Self::MOST);
        *waited.unwrap_or_else(PoisonError::into_inner) += 1;
    }

    pub(crate) fn one_fewer(&self) {
        *lock(&self.count) -= 1;
        self.fewer.notify_one();
    }
}

/// One of a limited number of places; returned when dropped.
pub(crate) struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    pub(crate) fn take(count: &'a AtomicUsize, limit: usize) -> Option<Self> {
        let place = Self(count);
        // If there was none, dropping `place` returns it.
        (count.fetch_add(1, Ordering::SeqCst) < limit).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Pauses an accept loop, which has most likely run out of descriptors. Clients wait meanwhile.
pub(crate) fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(50));
}

#[cfg(test)]
mod tests {
    use super::*;

    static PROTOCOL: Protocol = Protocol { magic: *b"TEST", owner: b"owner", client: b"client" };
    static OTHER: Protocol = Protocol { owner: b"other owner", ..PROTOCOL };

    fn talk() -> Talk {
        Talk { protocol: &PROTOCOL, door: [1; 16], realm: [2; 16], client: [3; 16], owner: [4; 16] }
    }

    #[test]
    fn a_proof_is_of_one_side_one_conversation_and_one_transport() {
        let proof = talk().prove(Side::Owner);
        assert!(talk().proves(Side::Owner, &proof));
        assert!(!talk().proves(Side::Client, &proof));
        for other in [
            Talk { client: [9; 16], ..talk() },
            Talk { owner: [9; 16], ..talk() },
            Talk { realm: [9; 16], ..talk() },
            Talk { door: [9; 16], ..talk() },
            Talk { client: [4; 16], owner: [3; 16], ..talk() },
            Talk { protocol: &OTHER, ..talk() },
        ] {
            assert!(!other.proves(Side::Owner, &proof), "{other:?}");
        }
    }

    #[test]
    fn an_owner_answers_who_wants_it_and_is_recognised() {
        let (client, realm) = ([3; 16], [2; 16]);
        let hello: [u8; HELLO] = part(&PROTOCOL.hello(&client, &realm), 0);
        let (owners, welcome) = PROTOCOL.answer(&hello, [1; 16], &realm).unwrap();
        let clients = PROTOCOL.recognise(&welcome, [1; 16], realm, client).unwrap();
        assert!(owners.proves(Side::Client, &clients.prove(Side::Client)));
        assert!(PROTOCOL.recognise(&welcome, [9; 16], realm, client).is_none());
        assert!(PROTOCOL.answer(&hello, [1; 16], &[9; 16]).is_none());
        assert!(PROTOCOL.answer(&[0; HELLO], [1; 16], &realm).is_none());
    }

    #[test]
    fn a_seal_is_of_one_side_one_connection_and_every_byte() {
        let sealed = talk().seal(Side::Client, b"message".to_vec());
        assert_eq!(talk().open(Side::Client, &sealed), Some(b"message".as_slice()));
        assert_eq!(talk().open(Side::Owner, &sealed), None);
        assert_eq!(Talk { owner: [8; 16], ..talk() }.open(Side::Client, &sealed), None);
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert_eq!(talk().open(Side::Client, &changed), None, "byte {at}");
            assert_eq!(talk().open(Side::Client, &sealed[..at]), None, "{at} bytes");
        }
    }

    #[test]
    fn places_are_limited_and_given_back() {
        let count = AtomicUsize::new(0);
        let one = Place::take(&count, 1).unwrap();
        assert!(Place::take(&count, 1).is_none());
        drop(one);
        assert!(Place::take(&count, 1).is_some());
    }
}
