//! What users say to the daemon, and how: job files, the control socket, HTTP.
//!
//! ```text
//!  job file ─▶ client ─┬─ socket ─▶ control ─┬─▶ Call { request, answer } ─▶ daemon
//!                      └─ HTTP ───▶ http ────┘          Reply ◀──────────────┘
//! ```
//!
//! - One request to a connection, one reply; the same requests over the socket and over HTTP.
//! - Files (journal, logs) are read in the thread of whoever asks; all else is decided by the daemon.
//! - Views ([`control::JobView`], [`control::MachineView`]) are for people: nothing is decided from them.

pub mod client;
pub mod control;
pub mod event_text;
pub mod http;
pub mod job_file;

use control::{Reply, Request};
use std::sync::mpsc::Sender;

/// A request, and where its reply goes.
pub struct Call {
    /// What a user wants.
    pub request: Request,
    /// Who waits for the reply.
    pub answer: Sender<Reply>,
}
