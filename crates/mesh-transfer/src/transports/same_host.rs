//! Shared by the transports that reach processes of this host without involving them. They find exports through the
//! owner's control page, and make the checks that the owner would make.

use crate::bytes::Reader;
use crate::cma::{Other, Way};
use crate::control::{Control, Offered, identity};
use crate::error::TransferError;
use crate::handle::{Handle, is_same};
use crate::lock;
use crate::operation::Op;
use crate::realm::{Realm, namespace};
use crate::segments::{MAX_SEGMENTS, Segment, Segments};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// This process, as processes of the same host see it.
#[derive(Debug)]
pub(super) struct Here {
    pub(super) realm: Realm,
    pub(super) namespace: u64,
}

impl Here {
    pub(super) fn new(realm: &Realm) -> Self {
        Self { realm: realm.clone(), namespace: namespace("pid") }
    }

    pub(super) fn probe(&self) -> Result<(), TransferError> {
        if self.namespace == 0 {
            return Err(TransferError::transport("cannot read /proc/self/ns/pid. Mount /proc in the container."));
        }
        Ok(())
    }

    /// Why processes of that pid namespace cannot be reached, if they cannot.
    pub(super) fn why_apart(&self, namespace: u64) -> Option<&'static str> {
        (namespace != self.namespace).then_some("its owner is in another pid namespace, such as another container")
    }

    /// Attaches to the owner of a handle, whose control page is its descriptor `fd`.
    pub(super) fn attach(&self, handle: &Handle, (fd, namespace): (u32, u64)) -> Result<Owner, TransferError> {
        if let Some(why) = self.why_apart(namespace) {
            return Err(TransferError::transport(why));
        }
        let control = Arc::new(Control::attach(handle.pid, fd, &handle.realm)?);
        let other = Other { pid: handle.pid, witness: control.witness(), realm: handle.realm };
        other.check()?;
        Ok(Owner { control, other, me: identity(self.realm.pid, self.realm.started) })
    }
}

/// Where an owner's control page is: the number of its descriptor, and the pid namespace.
pub(super) fn page(rest: &mut Reader<'_>) -> Result<(u32, u64), TransferError> {
    Ok((rest.u32()?, rest.u64()?))
}

/// A process of this host that offers memory.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) control: Arc<Control>,
    pub(super) other: Other,
    /// This process, as the holder of leases.
    pub(super) me: u64,
}

impl Owner {
    /// Copies a list from the owner's memory.
    pub(super) fn read_list(&self, at: u64, count: u64) -> Result<Segments, TransferError> {
        let count = usize::try_from(count).ok().filter(|count| *count <= MAX_SEGMENTS).ok_or_else(damaged)?;
        let mut list = vec![Segment { addr: 0, len: 0 }; count];
        // SAFETY: the list has that many bytes.
        unsafe { self.read(at, list.as_mut_ptr() as u64, (count * size_of::<Segment>()) as u64)? };
        Segments::new(std::hint::black_box(list)).map_err(|_| damaged())
    }

    /// Copies from the owner's memory.
    ///
    /// # Safety
    /// `into` must be the address of `len` writable bytes.
    pub(super) unsafe fn read(&self, at: u64, into: u64, len: u64) -> Result<(), TransferError> {
        let there = Segments::new([Segment { addr: at, len }]).map_err(|_| damaged())?;
        self.other.step(Way::Read, Segments::one(into, len).window(0, len), there.window(0, len))
    }
}

/// Refuses what the owner would refuse. Needs a lease of the export.
pub(super) fn check(op: &Op, offered: &Offered) -> Result<(), TransferError> {
    if !is_same(&offered.token, &op.handle.token) {
        return Err(TransferError::refused("the owner does not recognise this handle"));
    }
    let (offset, len) = op.work.span();
    let end = op.handle.start.checked_add(offset).and_then(|at| at.checked_add(len));
    if end.is_none_or(|end| end > offered.length) {
        return Err(TransferError::refused("the handle names more than the owner offers"));
    }
    if op.work.writes() && !offered.writable {
        return Err(TransferError::refused("the owner offers this memory for reading only"));
    }
    Ok(())
}

pub(super) fn damaged() -> TransferError {
    TransferError::gone("the owner's table of buffers is damaged")
}

/// What was read from an owner's memory about its exports, by slot and generation.
#[derive(Debug)]
pub(super) struct Known<T>(Mutex<ByExport<T>>);

type ByExport<T> = HashMap<(u32, u32), (Offered, Arc<T>)>;

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Known<T> {
    /// The most exports remembered.
    const MOST: usize = 1 << 16;

    /// What is known of the export; read if nothing is, or if the owner now offers something else there.
    pub(super) fn get(
        &self,
        op: &Op,
        offered: Offered,
        read: impl FnOnce() -> Result<T, TransferError>,
    ) -> Result<Arc<T>, TransferError> {
        let name = (op.handle.slot, op.handle.generation);
        if let Some((then, known)) = lock(&self.0).get(&name)
            && *then == offered
        {
            return Ok(Arc::clone(known));
        }
        let known = Arc::new(read()?);
        let mut all = lock(&self.0);
        if all.len() >= Self::MOST {
            all.clear();
        }
        all.insert(name, (offered, Arc::clone(&known)));
        Ok(known)
    }
}
