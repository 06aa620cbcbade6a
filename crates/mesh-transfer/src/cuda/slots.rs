//! Host memory in which GPU memory is staged.

use super::driver::{Device, Driver};
use std::sync::Arc;

const PAGE: usize = 4096;

/// A piece of host memory, pinned if possible: GPUs access pinned memory directly and at full speed.
#[derive(Debug)]
pub(crate) struct Slot {
    driver: Arc<dyn Driver>,
    device: Device,
    addr: u64,
    len: u64,
    /// Pageable memory, used if pinning failed: the driver copies it in pieces, through its own pinned memory.
    plain: Option<Box<[u8]>>,
    pid: u32,
}

impl Slot {
    pub(super) fn make(driver: &Arc<dyn Driver>, device: Device, len: u64, pid: u32) -> Self {
        let driver = Arc::clone(driver);
        match driver.allocate_pinned(device, len) {
            Ok(addr) => Self { driver, device, addr, len, plain: None, pid },
            Err(_) => {
                let plain = vec![0_u8; len as usize + PAGE].into_boxed_slice();
                let addr = (plain.as_ptr() as u64).next_multiple_of(PAGE as u64);
                Self { driver, device, addr, len, plain: Some(plain), pid }
            }
        }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // CUD-3
        if self.plain.is_none() && crate::realm::pid() == self.pid {
            self.driver.free_pinned(self.device, self.addr);
        }
    }
}
