//! The page of the spin board, as threads of a model share it.

use crate::error::RuntimeError;
use crate::sync::{AtomicU8, AtomicU32};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

pub(crate) const SEATS: u32 = 2;

#[derive(Clone, Debug, Default)]
pub(crate) struct Page(Arc<(AtomicU32, AtomicU32, [AtomicU8; SEATS as usize])>);

impl Page {
    #[expect(clippy::unnecessary_wraps, reason = "as that of the real one")]
    pub(crate) fn create() -> Result<Self, RuntimeError> {
        Ok(Self::default())
    }

    pub(crate) fn open(_: OwnedFd) -> Result<Self, RuntimeError> {
        unimplemented!("processes of a model share a page by cloning it")
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        unimplemented!("the page of a model has no descriptor")
    }

    pub(crate) fn active(&self) -> &AtomicU32 {
        &self.0.0
    }

    pub(crate) fn looking(&self) -> &AtomicU32 {
        &self.0.1
    }

    pub(crate) fn flag(&self, seat: u32) -> Option<&AtomicU8> {
        self.0.2.get(seat as usize)
    }
}
