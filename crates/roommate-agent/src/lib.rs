//! The real world around the engine: one machine, on which jobs are processes.
//!
//! ```text
//!  users ─▶ api ─▶ daemon (engine, store) ── orders ──▶ machine ─▶ device, process
//!                        ▲                                 │
//!                        └──────────── reports ────────────┘◀── protocol ── SDK
//! ```
//!
//! Read in this order: [`protocol`] (messages between SDK and machine), [`process`] (supervisors,
//! which outlive the daemon), [`device`] (how shares are enforced), [`machine`] (tenants: orders
//! in, reports out), [`api`] (requests and replies), [`daemon`] (engine, store, recovery).
//! [`profiling`] measures tasks alone and side by side without an engine.
//!
//! Every decision is in the [`daemon::store`] before it is carried out. A daemon that was killed
//! therefore continues where it stopped: it replays its journal and looks for the processes that it
//! had started. There are threads instead of an asynchronous runtime, because a machine has tens of
//! tenants, not thousands, and each connection is a loop that reads lines.

pub mod api;
pub mod daemon;
pub mod device;
pub mod error;
pub mod machine;
pub(crate) mod os;
pub mod paths;
pub mod process;
pub mod profiling;
pub mod protocol;
#[cfg(test)]
mod twin;

pub use api::client::Client;
pub use error::AgentError;
