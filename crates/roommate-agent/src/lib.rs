//! One machine for real: the world around the engine in which jobs are processes.
//!
//! ```text
//!  users ─▶ api ─▶ daemon (engine, store) ── orders ──▶ machine ─▶ device, process
//!                        ▲                                 │
//!                        └──────────── reports ────────────┘◀── protocol ── SDK
//! ```
//!
//! Read in this order: [`protocol`] (what the SDK and a machine say), [`process`] (supervisors that
//! outlive the daemon), [`device`] (how shares are enforced), [`machine`] (tenants: orders in, reports
//! out), [`api`] (requests and replies), [`daemon`] (engine, store, recovery). [`profiling`] measures
//! tasks alone and side by side without an engine.
//!
//! Everything that was decided is in the [`daemon::store`] before it is done, so a daemon that is killed
//! at any moment goes on where it was: it decides everything again from its journal, and looks for the
//! processes that it had. Threads instead of an asynchronous runtime: a machine has tens of tenants, not
//! thousands, and each connection is a loop that reads a line.

pub mod api;
pub mod daemon;
pub mod device;
pub mod error;
pub mod machine;
pub mod paths;
pub mod process;
pub mod profiling;
pub mod protocol;

pub use api::client::Client;
pub use error::AgentError;
