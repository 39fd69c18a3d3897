//! One machine for real: the world around the engine in which jobs are processes.
//!
//! A daemon ([`daemon`]) owns the engine; one thread, fed by a channel. Jobs run under a supervisor
//! ([`process::supervisor`]), a small process of its own that outlives the daemon and remembers how the job ended.
//! Jobs that use the SDK speak [`protocol`] with the daemon, the others are held and let go by
//! signals. Everything that was decided is in the [`daemon::store`] before it is done, so a daemon that is
//! killed at any moment goes on where it was: it decides everything again from its journal, and looks
//! for the processes that it had.
//!
//! Threads instead of an asynchronous runtime: a machine has tens of tenants, not thousands, and each
//! connection is a loop that reads a line.

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
