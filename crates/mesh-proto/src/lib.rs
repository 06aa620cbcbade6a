//! What Mesh processes tell each other, as data and state machines without clock or I/O.
//!
//! - [`Header`], [`Frame`], [`Decoder`]: the bytes on a link.
//! - [`messages`]: what links carry between actors, as types.
//! - [`control`]: what processes tell each other besides messages, as types.
//! - [`EndReason`], [`Undelivered`], [`PortEnd`]: why something ended, as types.
//! - [`Placement`]: which host each rank of a mesh is on.
//! - [`Joined`]: receivers that are not a region of one mesh.
//! - [`Moves`]: where the ranks of repaired meshes are.
//! - [`Router`]: where a frame goes next, on the host agent and in its procs.
//! - [`DirectPlan`]: which messages go straight from one proc of a host to another.
//! - [`Early`]: messages that overtake the spawn that they depend on.
//! - [`Landing`]: messages whose large parts are still being fetched, and those after them.
//! - [`Meter`], [`Ledger`]: how much may be in flight to one mailbox.
//! - [`Backlog`]: messages that wait for room while their senders continue.
//! - [`Answers`]: replies that wait until their callers' processes read.
//! - [`Gather`]: merges many replies into one.
//! - [`Holders`]: who may still answer a call through its port.
//! - [`Lifecycle`]: a proc from its spawn to the one notice of its end.
//! - [`Family`]: who owns whom, and what a death entails.
//! - [`hosts`]: many hosts as one.
//! - [`logs`]: turns what procs print into what is shown.
//!
//! Nothing here reads a clock, a socket or the environment; time is passed in where it matters.
#![forbid(unsafe_code)]

mod answers;
mod backlog;
mod carried;
mod codec;
mod codes;
pub mod control;
mod copies;
mod decode;
mod direct;
mod early;
mod error;
mod family;
mod flow;
mod frame;
mod gather;
mod given_up;
mod holders;
pub mod hosts;
mod ids;
mod landing;
mod lifecycle;
pub mod logs;
pub mod messages;
mod moves;
mod part;
mod placement;
mod reason;
mod router;
mod target;

pub use answers::{Answer, Answers, Kept, REPLY_WINDOW};
pub use backlog::{Backlog, Place};
pub use carried::Carried;
pub use copies::{Asker, Bereft, Copies, ValueKey, Wanted};
pub use decode::{Decoder, READ_CHUNK};
pub use direct::{Choice, DirectPlan, Heard, Incoming, Reason, choose};
pub use early::Early;
pub use error::{FrameError, MAX_BODY};
pub use family::{Aftermath, Family, Owned};
pub use flow::{Admission, Credit, Flow, INITIAL_WINDOW, Ledger, Meter, Progress, REPLIES, SPAWNS};
pub use frame::{Frame, HEADER_LEN, Header, Kind, MESSAGE_COST, Sharing};
pub use gather::{Gather, Outcome};
pub use given_up::{GivenUp, Reasons};
pub use holders::{Deserter, Holders, Ticket, Verdict};
pub use ids::{
    ActorId, CallId, GUEST_MESHES, HOST_MESHES, HostNo, IdMaker, MeshId, ProcAddr, is_guest_mesh, is_host_mesh,
};
pub use landing::Landing;
pub use lifecycle::{Actions, Ended, Event, Exit, Lifecycle, MOST_EXTENSIONS, Stage};
pub use moves::{Moved, Moves, Run, Seat};
pub use part::{Part, SharedRef};
pub use placement::{Placement, Spread};
pub use reason::{EndKind, EndReason, HostEnd, PortEnd, Undelivered};
pub use router::{LinkId, Route, Router};
pub use target::{Joined, Piece, Target};
