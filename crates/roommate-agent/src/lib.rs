//! One machine for real: the world around the engine in which jobs are processes.
//!
//! A daemon ([`world`]) owns the engine; one thread, fed by a channel. Jobs run under a keeper
//! ([`keeper`]), a small process of its own that outlives the daemon and remembers how the job ended.
//! Jobs that use the SDK speak [`protocol`] with the daemon, the others are held and let go by
//! signals. Everything that was decided is in the [`store`] before it is done, so a daemon that is
//! killed at any moment goes on where it was: it decides everything again from its journal, and looks
//! for the processes that it had.
//!
//! Threads instead of an asynchronous runtime: a machine has tens of tenants, not thousands, and each
//! connection is a loop that reads a line.

mod client;
pub mod control;
pub mod device;
pub mod error;
mod fate;
mod gpu;
mod guard;
mod heard;
pub mod http;
pub mod jobfile;
pub mod keep;
pub mod keeper;
mod live;
pub mod measure;
pub mod parts;
pub mod paths;
mod peer;
mod process;
pub mod protocol;
mod recover;
mod seating;
mod segment;
pub mod signal;
mod slice;
mod stage;
pub mod store;
pub mod words;
pub mod world;

pub use client::Client;
pub use error::AgentError;
