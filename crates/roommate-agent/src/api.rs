//! The interface of the daemon for users: job files, the control socket, HTTP.
//!
//! ```text
//!  job file ─▶ client ─┬─ socket ─▶ control ─┬─▶ service ─▶ Call { request, caller } ─▶ daemon
//!                      └─ HTTPS ──▶ http ────┘                 Reply ◀─────────────────┘
//! ```
//!
//! - A connection carries one request and one reply, the same over the socket and over HTTP.
//! - Who asks is known before anything is done: by the socket's peer, or by a token ([`caller`]).
//! - Files (journal, logs, tokens) are read in the thread of the connection; everything else is
//!   decided by the daemon.
//! - Every connection has a limited time and size, and every user a limited number of them.
//! - Views ([`control::JobView`], [`control::MachineView`]) are for people: nothing is decided from
//!   them.

pub mod caller;
pub mod client;
pub(crate) mod connections;
pub mod control;
pub mod dashboard;
pub mod event_text;
pub mod http;
pub mod job_file;
pub(crate) mod service;
pub(crate) mod tls;
pub(crate) mod tokens;

use caller::Caller;
use control::{Reply, Request};
use std::sync::mpsc::Sender;

/// A request, and where its reply goes.
pub struct Call {
    /// The user's request.
    pub request: Request,
    /// Who asks.
    pub caller: Caller,
    /// Receives the reply.
    pub answer: Sender<Reply>,
}
