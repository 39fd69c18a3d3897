//! The interface of the daemon for users: job files, the control socket, HTTP.
//!
//! ```text
//!  job file ─▶ client ─┬─ socket ─▶ control ─┬─▶ Call { request, answer } ─▶ daemon
//!                      └─ HTTP ───▶ http ────┘          Reply ◀──────────────┘
//! ```
//!
//! - A connection carries one request and one reply, the same over the socket and over HTTP.
//! - Files (journal, logs) are read in the thread of the connection; everything else is decided by
//!   the daemon.
//! - Views ([`control::JobView`], [`control::MachineView`]) are for people: nothing is decided from
//!   them.

pub mod client;
pub mod control;
pub mod event_text;
pub mod http;
pub mod job_file;

use control::{Reply, Request};
use std::sync::mpsc::Sender;

/// A request, and where its reply goes.
pub struct Call {
    /// The user's request.
    pub request: Request,
    /// Receives the reply.
    pub answer: Sender<Reply>,
}
