//! Turns operations into device requests: what goes into one, and with which keys.

use super::device::{Local, Region};
use super::offers::Offers;
use super::scan::RAILS;
use super::sys::{self, SIGNALLED, SendRequest, Sge, opcode};
use super::wire::Section;
use crate::error::TransferError;
use crate::operation::Op;
use crate::operation::Work;
use crate::registry::{Hold, Registry};
use crate::segments::Segment;
use crate::transports::Piece;
use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::Arc;

/// The most that one request moves, so that several rails share and nothing waits behind it for long.
pub(super) const CHUNK: u64 = 1 << 20;
/// The most requests posted to a device together.
pub(super) const TOGETHER: usize = 16;

/// The remote end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// The owner's address of the operation's first byte.
    pub(super) address: u64,
    /// Keys by rail of the owner.
    pub(super) keys: [u32; RAILS],
    /// Whether this part of the handle names the same export as the rest.
    pub(super) is_of_handle: bool,
}

impl Target {
    /// The target of an operation, which must lie inside what its handle says.
    pub(super) fn of(op: &Op, section: &Section) -> Result<Self, TransferError> {
        let refused = |why| TransferError::refused(why);
        let (offset, len) = op.work.span();
        let start = op.handle.start.checked_add(offset).filter(|start| {
            let end = start.checked_add(len);
            end.is_some_and(|end| end <= section.length)
        });
        let start = start.ok_or_else(|| refused("the handle names more than the owner offers"))?;
        if op.work.writes() && !section.writable {
            return Err(refused("the owner offers this memory for reading only"));
        }
        let address = section.address + start;
        if op.work.is_atomic() && !address.is_multiple_of(8) {
            return Err(TransferError::invalid(
                "the 8 bytes of an atomic operation must be at a multiple of 8 in the owner's memory",
            ));
        }
        let keys = std::array::from_fn(|at| section.rails.get(at).map_or(0, |rail| rail.key));
        let is_of_handle = (section.slot, section.generation) == (op.handle.slot, op.handle.generation);
        Ok(Self { address, keys, is_of_handle })
    }
}

/// Registered local memory of some operations.
#[derive(Debug, Default)]
pub(super) struct Known {
    holds: Vec<Hold<Region>>,
    /// Start, end and key of each; sorted and disjoint.
    read: Vec<(u64, u64, u32)>,
    written: Vec<(u64, u64, u32)>,
}

impl Known {
    /// Registers all local memory of these operations. It must stay in place while the result lives.
    pub(super) fn of(
        memory: &Arc<Registry<Local>>,
        offers: &Offers,
        ops: &[Op],
        page: u64,
    ) -> Result<Self, TransferError> {
        let mut known = Self::default();
        for writable in [false, true] {
            let mut list = Vec::new();
            for span in spans(ops, writable, page) {
                offers.keep(memory, span, writable);
                let hold = memory.hold(span.addr, span.len, writable)?;
                list.push((span.addr, span.addr + span.len, hold.region().lkey));
                known.holds.push(hold);
            }
            *(if writable { &mut known.written } else { &mut known.read }) = list;
        }
        Ok(known)
    }

    fn key(&self, piece: Segment, writable: bool) -> Option<u32> {
        let list = if writable { &self.written } else { &self.read };
        let at = list.partition_point(|(start, _, _)| *start <= piece.addr).checked_sub(1)?;
        let (_, end, key) = list[at];
        (piece.addr + piece.len <= end).then_some(key)
    }
}

/// The local memory that is written to, or read from. Pieces that share a page or lie on adjacent pages are joined:
/// between them there is then nothing but their own pages.
fn spans(ops: &[Op], writable: bool, page: u64) -> Vec<Segment> {
    let mut all: Vec<Segment> = Vec::new();
    for op in ops {
        match &op.work {
            Work::Read { local, .. } if writable => all.extend_from_slice(local.list()),
            Work::Write { local, .. } if !writable => all.extend_from_slice(local.list()),
            _ => {}
        }
    }
    all.sort_unstable_by_key(|piece| piece.addr);
    let mut spans: Vec<Segment> = Vec::new();
    for piece in all {
        match spans.last_mut() {
            Some(last) if (last.addr + last.len).next_multiple_of(page) >= piece.addr / page * page => {
                last.len = last.len.max(piece.addr + piece.len - last.addr);
            }
            _ => spans.push(piece),
        }
    }
    spans
}

/// One request, as posted to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) op: usize,
    pub(super) opcode: i32,
    pub(super) list: Vec<Sge>,
    pub(super) address: u64,
    pub(super) key: u32,
    /// For atomic operations: the summand, or the expected and the desired value.
    pub(super) numbers: (u64, u64),
}

impl Request {
    pub(super) fn bytes(&self) -> u64 {
        self.list.iter().map(|sge| u64::from(sge.len)).sum()
    }
}

/// Makes requests of pieces: one or more for each, depending on how scattered its local memory is.
pub(super) struct Maker<'a> {
    pub(super) ops: &'a [Op],
    pub(super) targets: &'a [Target],
    pub(super) known: &'a Known,
    /// The owner's rail.
    pub(super) rail: usize,
    pub(super) most: usize,
    pub(super) ready: VecDeque<Request>,
}

impl Maker<'_> {
    /// Returns the next request; none if there is no further piece.
    pub(super) fn next(&mut self, piece: impl Fn() -> Option<Piece>) -> Result<Option<Request>, TransferError> {
        while self.ready.is_empty() {
            let Some(piece) = piece() else { return Ok(None) };
            self.add(piece)?;
        }
        Ok(self.ready.pop_front())
    }

    fn add(&mut self, piece: Piece) -> Result<(), TransferError> {
        let (opcode, local) = match &self.ops[piece.op].work {
            Work::Read { local, .. } => (opcode::READ, local),
            Work::Write { local, .. } => (opcode::WRITE, local),
            _ => return Err(TransferError::transport("an atomic operation is no copy")),
        };
        let target = self.targets[piece.op];
        let mut address = target.address + piece.at;
        let mut list: Vec<Sge> = Vec::new();
        let mut filled = 0;
        let mut close = |list: &mut Vec<Sge>, filled: &mut u64, ready: &mut VecDeque<Request>| {
            let key = target.keys[self.rail];
            ready.push_back(Request {
                op: piece.op,
                opcode,
                list: std::mem::take(list),
                address,
                key,
                numbers: (0, 0),
            });
            address += *filled;
            *filled = 0;
        };
        for part in local.window(piece.at, piece.len) {
            let lost = || TransferError::transport("memory of the transfer is not known to the device");
            let key = self.known.key(part, opcode == opcode::READ).ok_or_else(lost)?;
            let len = u32::try_from(part.len).map_err(|_| lost())?;
            list.push(Sge { addr: part.addr, len, key });
            filled += part.len;
            if list.len() == self.most {
                close(&mut list, &mut filled, &mut self.ready);
            }
        }
        if !list.is_empty() {
            close(&mut list, &mut filled, &mut self.ready);
        }
        Ok(())
    }
}

/// Requests in the library's form: linked and numbered.
pub(super) struct Batch {
    list: Vec<SendRequest>,
    /// The requests whose lists are pointed to.
    requests: Vec<Request>,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self { list: Vec::with_capacity(TOGETHER), requests: Vec::with_capacity(TOGETHER) }
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
        self.requests.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.list.len() == TOGETHER
    }

    /// Adds a request; with `is_told`, its completion is reported.
    pub(super) fn push(&mut self, id: u64, request: Request, is_told: bool) {
        let is_atomic = matches!(request.opcode, opcode::COMPARE_AND_SWAP | opcode::FETCH_ADD);
        let (first, second) = request.numbers;
        // As in C: the key takes the first four bytes of the field that it shares.
        let shared =
            u64::from_ne_bytes(std::array::from_fn(|at| request.key.to_ne_bytes().get(at).copied().unwrap_or(0)));
        self.list.push(SendRequest {
            id,
            next: null_mut(),
            list: null_mut(),
            count: 0,
            opcode: request.opcode,
            flags: if is_told { SIGNALLED } else { 0 },
            immediate: 0,
            remote: request.address,
            key_or_first: if is_atomic { first } else { shared },
            second,
            key: if is_atomic { request.key } else { 0 },
            rest: [0; 7],
        });
        self.requests.push(request);
    }

    /// The first request, which links to the next; valid until the batch changes.
    pub(super) fn linked(&mut self) -> *mut sys::SendRequest {
        let first = self.list.as_mut_ptr();
        for (at, request) in self.requests.iter_mut().enumerate() {
            let next = if at + 1 < self.list.len() { first.wrapping_add(at + 1) } else { null_mut() };
            let each = &mut self.list[at];
            each.next = next;
            each.list = request.list.as_mut_ptr();
            each.count = request.list.len() as i32;
        }
        self.list.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::handle::Handle;
    use crate::segments::Segments;
    use crate::transports::pieces;

    fn handle() -> Arc<Handle> {
        Arc::new(Handle {
            realm: [0; 16],
            boot: [0; 16],
            pid: 1,
            host: String::new(),
            token: [0; 16],
            slot: 0,
            generation: 1,
            length: 1 << 40,
            start: 8,
            len: (1 << 40) - 8,
            writable: true,
            sections: Vec::new(),
        })
    }

    fn read(addr: u64, len: u64) -> Op {
        Op { handle: handle(), work: Work::Read { local: Segments::one(addr, len), offset: 0 } }
    }

    fn write(addr: u64, len: u64) -> Op {
        Op { handle: handle(), work: Work::Write { local: Segments::one(addr, len), offset: 0 } }
    }

    #[test]
    fn operations_are_cut_into_chunks() {
        let ops = [read(0x1000, 0), read(0x1000, 10), read(0x1000, 25)];
        let cut: Vec<_> = pieces(&ops, 10).into_iter().map(|piece| (piece.op, piece.at, piece.len)).collect();
        assert_eq!(cut, [(1, 0, 10), (2, 0, 10), (2, 10, 10), (2, 20, 5)]);
    }

    #[test]
    fn memory_is_joined_only_where_pages_meet() {
        let page = 0x1000;
        let ops = [read(0x5008, 8), read(0x1010, 0x20), read(0x2ff0, 0x10), write(0x1000, 8), read(0x3000, 8)];
        let of = |writable| -> Vec<_> {
            spans(&ops, writable, page).into_iter().map(|span| (span.addr, span.len)).collect()
        };
        assert_eq!(of(true), [(0x1010, 0x1ff8), (0x5008, 8)]);
        assert_eq!(of(false), [(0x1000, 8)]);
    }

    #[test]
    fn a_shorter_piece_inside_of_a_longer_one_changes_nothing() {
        let ops = [read(0x1000, 0x3000), read(0x1100, 8)];
        assert_eq!(spans(&ops, true, 0x1000), [Segment { addr: 0x1000, len: 0x3000 }]);
    }

    #[test]
    fn scattered_memory_makes_several_requests_of_one_piece() {
        let parts = [(0x1000, 4), (0x2000, 6), (0x3000, 5)];
        let local = Segments::new(parts.map(|(addr, len)| Segment { addr, len })).unwrap();
        let ops = [Op { handle: handle(), work: Work::Read { local, offset: 0 } }];
        let targets = [Target { address: 100, keys: [7, 8, 0, 0], is_of_handle: true }];
        let known = Known { written: vec![(0x1000, 0x3005, 9)], ..Known::default() };
        let mut maker = Maker { ops: &ops, targets: &targets, known: &known, rail: 1, most: 2, ready: VecDeque::new() };
        let left = std::cell::RefCell::new(pieces(&ops, CHUNK));
        let mut made = Vec::new();
        while let Some(request) = maker.next(|| left.borrow_mut().pop()).unwrap() {
            made.push((
                request.address,
                request.key,
                request.list.iter().map(|sge| (sge.addr, sge.len)).collect::<Vec<_>>(),
            ));
        }
        assert_eq!(made, [(100, 8, vec![(0x1000, 4), (0x2000, 6)]), (110, 8, vec![(0x3000, 5)])]);
    }

    #[test]
    fn what_lies_outside_of_the_export_is_refused_before_it_is_asked_for() {
        let section = Section {
            writable: false,
            nearest: 0,
            door: "127.0.0.1:1".parse().unwrap(),
            key: [0; 16],
            address: 0x1001,
            length: 16,
            slot: 0,
            generation: 1,
            rails: Vec::new(),
        };
        assert_eq!(Target::of(&read(0x1000, 8), &section).unwrap().address, 0x1009);
        assert_eq!(Target::of(&read(0x1000, 9), &section).unwrap_err().kind, ErrorKind::Refused);
        assert_eq!(Target::of(&write(0x1000, 1), &section).unwrap_err().kind, ErrorKind::Refused);
        let add = Op { handle: handle(), work: Work::FetchAdd { offset: 0, value: 1 } };
        let writable = Section { writable: true, ..section };
        assert_eq!(Target::of(&add, &writable).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn requests_are_linked_and_the_key_is_where_c_has_it() {
        let request = |opcode, numbers| Request {
            op: 0,
            opcode,
            list: vec![Sge { addr: 1, len: 2, key: 3 }],
            address: 4,
            key: 0x55,
            numbers,
        };
        let mut batch = Batch::new();
        batch.push(7, request(opcode::READ, (0, 0)), false);
        batch.push(8, request(opcode::COMPARE_AND_SWAP, (1, 2)), true);
        let first = batch.linked();
        // SAFETY: made by `linked`, of two requests.
        let (read, swap) = unsafe { (&*first, &*(*first).next) };
        assert_eq!((read.id, read.flags, read.count, read.key_or_first.to_ne_bytes()[0]), (7, 0, 1, 0x55));
        assert_eq!((swap.id, swap.flags, swap.key_or_first, swap.second, swap.key), (8, SIGNALLED, 1, 2, 0x55));
        assert!(swap.next.is_null());
        // SAFETY: points to the request's list, which the batch keeps.
        assert_eq!(unsafe { *read.list }, Sge { addr: 1, len: 2, key: 3 });
    }
}
