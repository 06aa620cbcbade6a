//! The owner's part in a write that it reads itself (UCX-5): it gets the bytes from the writer's memory into the export.

use super::driver::{BYTES, WINDOW};
use super::library::OK;
use super::objects::{Context, Endpoint, Key, Request, Worker};
use super::wire::{Name, Pull};
use crate::error::TransferError;
use std::collections::VecDeque;

/// Of these a writer has no more under way, and their keys are no longer, if it is one of ours.
pub(super) const MOST: usize = 4096;
const KEY: usize = 4096;

/// What one writer has asked for.
#[derive(Debug)]
pub(super) struct Pulls<'a> {
    worker: &'a Worker,
    context: &'a Context,
    endpoint: Option<Endpoint<'a>>,
    waiting: VecDeque<Pull>,
    under_way: Vec<Getting>,
}

#[derive(Debug)]
struct Getting {
    pull: Pull,
    request: Request,
    /// Used until the request has ended.
    key: Key,
}

impl<'a> Pulls<'a> {
    pub(super) fn new(worker: &'a Worker, context: &'a Context) -> Self {
        Self { worker, context, endpoint: None, waiting: VecDeque::new(), under_way: Vec::new() }
    }

    /// Where the writer's own worker is.
    pub(super) fn reach(&mut self, address: &[u8]) -> Result<(), TransferError> {
        if self.endpoint.is_none() {
            self.endpoint = Some(Endpoint::new(self.worker, address)?);
        }
        Ok(())
    }

    pub(super) fn add(&mut self, pull: Pull) -> Result<(), TransferError> {
        if self.endpoint.is_none() || self.waiting.len() >= MOST || pull.key.len() > KEY {
            return Err(super::wire::nonsense());
        }
        self.waiting.push_back(pull);
        Ok(())
    }

    /// Whether an export is written to, or is about to be.
    pub(super) fn uses(&self, name: Name) -> bool {
        self.waiting.iter().chain(self.under_way.iter().map(|getting| &getting.pull)).any(|pull| pull.name == name)
    }

    /// Goes on with all; the numbers of those that are there now, each of them once.
    ///
    /// # Safety
    /// What was added must be within exports that are there for as long as `uses` says so, and this lives.
    pub(super) unsafe fn advance(&mut self) -> Result<Vec<u32>, TransferError> {
        let Some(endpoint) = &self.endpoint else { return Ok(Vec::new()) };
        let lost = |status| {
            let why = self.context.library().say(status);
            TransferError::transport(format!("UCX cannot read from the writer: {why}"))
        };
        let mut done = Vec::new();
        let mut failed = OK;
        self.under_way.retain(|getting| {
            match endpoint.ended(&getting.request) {
                None => return true,
                Some(OK) => done.push(getting.pull.number),
                Some(status) => failed = status,
            }
            false
        });
        if failed != OK || endpoint.has_failed() {
            return Err(lost(failed));
        }
        let mut bytes: u64 = self.under_way.iter().map(|getting| getting.pull.len).sum();
        while self.under_way.len() < WINDOW
            && bytes < BYTES
            && let Some(pull) = self.waiting.pop_front()
        {
            let key = endpoint.unpack(&pull.key)?;
            // SAFETY: memory of an export that its owner keeps, as the caller vouches, until the request has ended, which it
            // has when it is no longer in the list, or the endpoint is closed.
            let request = unsafe { endpoint.get(pull.to, pull.from, pull.len, &key) }.map_err(lost)?;
            match request {
                Some(request) => {
                    bytes = bytes.saturating_add(pull.len);
                    self.under_way.push(Getting { pull, request, key });
                }
                None => done.push(pull.number),
            }
        }
        Ok(done)
    }
}

impl Drop for Pulls<'_> {
    fn drop(&mut self) {
        let Some(endpoint) = self.endpoint.take() else { return };
        let (mut requests, keys): (Vec<_>, Vec<_>) =
            self.under_way.drain(..).map(|getting| (getting.request, getting.key)).unzip();
        // When it returns nothing is written any longer.
        endpoint.close(&mut requests);
        drop(keys);
    }
}
